"""Parts of tests of the HTTP service: the client in memory behind it, also one that holds its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from fastapi.testclient import TestClient

from coordinator_actor.access_tokens import AccessTokens, MemoryTokenStore
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.server.tokens import CoordinatorTokens
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import create_app
from tests.patience import PATIENCE
from tests.spark_bridge.state_http.memory_client import TOKEN, MemoryClient, Rows

BEARER = {"Authorization": f"Bearer {TOKEN}"}
PROBLEM = "application/problem+json"


def connected(client: MemoryClient) -> Callable[[], Any]:
    async def connect() -> Any:
        return client

    return connect


class Together:
    """A barrier of one event loop: holds its waiters until ``many`` tasks have arrived, which need not all wait."""

    def __init__(self, many: int) -> None:
        self.missing = many
        self.all = asyncio.Event()

    def come(self) -> None:
        self.missing -= 1
        if self.missing <= 0:
            self.all.set()

    async def wait(self) -> None:
        self.come()
        await asyncio.wait_for(self.all.wait(), PATIENCE)


@dataclass
class HeldClient(MemoryClient):
    """Its keys and the rows of its scans wait for ``together``."""

    together: Together = field(default_factory=lambda: Together(1))

    async def get(self, *args: Any, **options: Any) -> Any:
        await self.together.wait()
        return await super().get(*args, **options)

    async def _scan(self, *args: Any) -> Rows:
        rows = await super()._scan(*args)
        return HeldRows(rows.table, rows.version, self)


class HeldRows(Rows):
    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        assert isinstance(self.owner, HeldClient)
        await self.owner.together.wait()
        async for batch in super().__aiter__():
            yield batch


def raw(app: Any, method: str, path: str, body: bytes, leave_after: int | None = None) -> tuple[list[bytes], bool]:
    """The pieces of an answer, and whether it is complete. The server logs errors of the application."""
    pieces: list[bytes] = []
    ended = False

    async def call() -> None:
        gone = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            if message is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            nonlocal ended
            if message["type"] == "http.response.body":
                if message.get("body"):
                    pieces.append(message["body"])
                ended = not message.get("more_body", False)
            if leave_after is not None and len(pieces) >= leave_after:
                gone.set()

        headers = [
            (b"authorization", f"Bearer {TOKEN}".encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        try:
            await app(scope, receive, send)
        finally:
            # What a caller who has left leaves to be done.
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left, timeout=PATIENCE)

    try:
        asyncio.run(call())
    except Exception:  # noqa: BLE001 - a server logs it, whatever it is
        assert not ended
    return pieces, ended


# -- real hosts ----------------------------------------------------------------------------------

SECRET = "the-cluster's"


class TokensOnly:
    """A coordinator, as far as tokens go."""

    def __init__(self) -> None:
        self.tokens = AccessTokens(SECRET, MemoryTokenStore(), lambda: 1e9)
        self.is_away = False

    def __call__(self, method: str) -> Any:
        if self.is_away:
            raise HostUnavailableError("The coordinator does not answer.")
        return {"token": lambda: SECRET, "list_tokens": self.tokens.list_tokens}[method]()


@contextmanager
def answering(client: Any, limits: HttpLimits | None = None) -> Iterator[TestClient]:
    tokens = CoordinatorTokens(TokensOnly())
    made = AsyncQueryableStateClient(client)

    async def connect() -> AsyncQueryableStateClient:
        return made

    app = create_app(connect, tokens, limits or HttpLimits(timeout=PATIENCE), tokens.kept_up)
    with TestClient(app, headers={"Authorization": f"Bearer {SECRET}"}) as http:
        tokens.ask()
        yield http
