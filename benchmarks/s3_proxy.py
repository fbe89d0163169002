"""An S3-protocol server behind a proxy that makes each request slower and counts requests, each in its own process.

The server is moto's, as in the tests. The proxy adds ``delay`` seconds to a request before the server sees it, and ten
times as much to one request of 200 with ``tail``: each bucket has its own delay and its own counts. The time of the
server itself is added to that, so that figures at no delay are those of moto.

    python benchmarks/s3_proxy.py PORT      the proxy alone, before a server on that port; commands on standard input
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
TAIL_SHARE, TAIL_TIMES = 0.005, 10


@dataclass(frozen=True)
class Traffic:
    """What went through the proxy since the last look: requests by kind, bytes to the server and from it."""

    requests: Counter[str]
    sent: int
    received: int


class ProxiedS3:
    """A running server and its proxy. ``direct`` is the server's own address, where nothing is counted."""

    def __init__(self, endpoint: str, direct: str, commands: IO[bytes], answers: IO[bytes]) -> None:
        self.endpoint = endpoint
        self.direct = direct
        self._commands = commands
        self._answers = answers

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket; there must be none of that name."""
        connection = http.client.HTTPConnection(self.direct.removeprefix("http://"), timeout=30)
        try:
            connection.request("PUT", f"/{bucket}", headers={"Authorization": "AWS any:any"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"The bucket {bucket!r} was not made: {answer.status} {answer.read()!r}")
        finally:
            connection.close()

    def options(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the storage options that connect to the server, by default through the proxy."""
        return {
            "fs.s3a.endpoint": endpoint or self.endpoint,
            "fs.s3a.path.style.access": "true",
            "fs.s3a.access.key": "any",
            "fs.s3a.secret.key": "any",
        }

    def slow_down(self, bucket: str, delay: float, tail: bool = False) -> None:
        """Have each request to a bucket take ``delay`` seconds longer from now on."""
        self._tell({"bucket": bucket, "delay": delay, "tail": tail})

    def traffic(self, bucket: str) -> Traffic:
        """Return what has gone through to a bucket since the last call."""
        told = self._tell({"bucket": bucket})
        return Traffic(Counter(told["requests"]), told["sent"], told["received"])

    def _tell(self, command: Mapping[str, Any]) -> Any:
        self._commands.write(json.dumps(command).encode() + b"\n")
        self._commands.flush()
        return json.loads(self._answers.readline())


@contextmanager
def proxied_s3() -> Iterator[ProxiedS3]:
    """Run a server and a proxy before it; both end with the block."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.backends.storage.s3_faults import s3_server

    with s3_server() as server, proxy_before(server.port) as proxied:
        yield proxied


@contextmanager
def proxy_before(port: int) -> Iterator[ProxiedS3]:
    """Run a proxy before the server on ``port``; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        own_port = json.loads(process.stdout.readline())
        yield ProxiedS3(f"http://{HOST}:{own_port}", f"http://{HOST}:{port}", process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


# -- the proxy's process -------------------------------------------------------------------------


@dataclass
class Bucket:
    delay: float = 0.0
    tail: bool = False
    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0

    def seconds(self) -> float:
        slow = self.tail and random.random() < TAIL_SHARE
        return self.delay * (TAIL_TIMES if slow else 1)


class Proxy:
    """Forwards requests. Memory grows with the requests under way and their bodies."""

    def __init__(self, port_behind: int) -> None:
        self._port_behind = port_behind
        self._buckets: dict[str, Bucket] = defaultdict(Bucket)

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        bucket = self._buckets[command["bucket"]]
        if "delay" in command:
            bucket.delay, bucket.tail = command["delay"], command["tail"]
            return {}
        told = {"requests": bucket.requests, "sent": bucket.sent, "received": bucket.received}
        self._buckets[command["bucket"]] = Bucket(bucket.delay, bucket.tail)
        return told

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the requests of one connection, one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, headers = _parsed(head)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ", 2)
                name = target.lstrip("/").replace("?", "/").partition("/")[0]
                bucket = self._buckets[name]
                bucket.requests[kind_of(method, target)] += 1
                bucket.sent += len(body)
                await asyncio.sleep(bucket.seconds())
                answer, received = await self._forward(method, head, body)
                self._buckets[name].received += received
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has hung up, or the proxy ends
        finally:
            writer.close()

    async def _forward(self, method: str, head: bytes, body: bytes) -> tuple[bytes, int]:
        reader, writer = await asyncio.open_connection(HOST, self._port_behind)
        try:
            kept = [x for x in head[:-4].split(b"\r\n") if not x.lower().startswith((b"connection:", b"expect:"))]
            writer.write(b"\r\n".join((*kept, b"Connection: close")) + b"\r\n\r\n" + body)
            await writer.drain()
            top = (await reader.readuntil(b"\r\n\r\n"))[:-4]
            _, headers = _parsed(top)
            if "transfer-encoding" in headers:
                raise ValueError(f"moto answered in chunks, which this proxy does not read: {top!r}")
            if method == "HEAD":
                content = b""
            elif "content-length" in headers:  # moto closes the connection some 10 ms behind the last byte
                content = await reader.readexactly(int(headers["content-length"]))
            else:
                content = await reader.read(-1)
        finally:
            writer.close()
        lines = [x for x in top.split(b"\r\n") if not x.lower().startswith(b"connection:")]
        lines[0] = lines[0].replace(b"HTTP/1.0", b"HTTP/1.1")
        if "content-length" not in headers and method != "HEAD":
            lines.append(b"Content-Length: %d" % len(content))
        return b"\r\n".join(lines) + b"\r\n\r\n" + content, len(content)


def kind_of(method: str, target: str) -> str:
    """Return what a request is called in a bill: GET, PUT, HEAD, LIST, DELETE or bulk DELETE."""
    query = target.partition("?")[2]
    if method == "GET" and "list-type=" in query:
        return "LIST"
    if method == "POST":
        return "bulk DELETE" if query.split("=")[0] == "delete" else "PUT"
    return method


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (x.partition(":") for x in rest)
    return line, {name.lower(): value.strip() for name, _, value in pairs}


async def _main(port_behind: int) -> None:
    proxy = Proxy(port_behind)
    server = await asyncio.start_server(proxy.serve, HOST, 0, limit=1 << 20, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        print(json.dumps(proxy.obey(json.loads(line))), flush=True)
    server.close()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
