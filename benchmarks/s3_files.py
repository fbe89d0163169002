"""A server in its own process that speaks the S3 protocol for files of a directory, as slow as it is told to be.

moto copies every object through Python several times, so it cannot send 200 MB a second. This server sends files with
``sendfile``. Each request waits ``latency`` seconds before its answer. All answers together have ``bandwidth`` bytes a
second, and each connection has ``of_connection`` bytes a second. Buckets are directories below the root.

    python benchmarks/s3_files.py ROOT LATENCY BANDWIDTH OF_CONNECTION
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

HOST = "127.0.0.1"
PIECE_BYTES = 128 << 10
BURST_SECONDS = 0.01
"""Bandwidth that was not used for this long may be used later."""


class FileS3:
    """A running server."""

    def __init__(self, endpoint: str, commands: IO[bytes], answers: IO[bytes]) -> None:
        self.endpoint = endpoint
        self._commands = commands
        self._answers = answers

    def options(self) -> dict[str, str]:
        """Return the storage options that connect to the server."""
        return {
            "fs.s3a.endpoint": self.endpoint,
            "fs.s3a.path.style.access": "true",
            "fs.s3a.access.key": "any",
            "fs.s3a.secret.key": "any",
        }

    def traffic(self) -> tuple[Counter[str], int]:
        """Return the requests by kind and the bytes that were sent since the last call."""
        self._commands.write(b"\n")
        self._commands.flush()
        told = json.loads(self._answers.readline())
        return Counter(told["requests"]), told["sent"]


@contextmanager
def file_s3(root: Path, latency: float, bandwidth: float, of_connection: float = math.inf) -> Iterator[FileS3]:
    """Serve the directories below ``root`` as buckets; the server ends with the block."""
    command = [sys.executable, str(Path(__file__).resolve()), str(root)]
    process = subprocess.Popen(
        [*command, str(latency), str(bandwidth), str(of_connection)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = json.loads(process.stdout.readline())
        yield FileS3(f"http://{HOST}:{port}", process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


# -- the server's process ------------------------------------------------------------------------


@dataclass
class Rate:
    """Bytes a second, shared by all that ask: first come, first served."""

    per_second: float
    _free_at: float = 0.0

    async def take(self, nbytes: int) -> None:
        if self.per_second == math.inf:
            return
        start = max(self._free_at, time.monotonic() - BURST_SECONDS)
        self._free_at = start + nbytes / self.per_second
        if (wait := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(wait)


@dataclass
class Answer:
    status: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None
    start: int = 0
    length: int = 0


class Server:
    def __init__(self, root: Path, latency: float, bandwidth: float, of_connection: float) -> None:
        self._root = root
        self._latency = latency
        self._rate = Rate(bandwidth)
        self._of_connection = of_connection
        self._requests: Counter[str] = Counter()
        self._sent = 0

    def told(self) -> dict[str, Any]:
        told = {"requests": self._requests, "sent": self._sent}
        self._requests, self._sent = Counter(), 0
        return told

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        rate = Rate(self._of_connection)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *rest = head.rstrip("\r\n").split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (x.partition(":") for x in rest)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ", 2)
                await asyncio.sleep(self._latency)
                answer = self._answer(method, target, headers, body)
                await self._send(writer, rate, method, answer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has hung up, or the server ends
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, rate: Rate, method: str, answer: Answer) -> None:
        length = answer.length if answer.file is not None else len(answer.body)
        lines = [f"HTTP/1.1 {answer.status}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        if method == "HEAD":
            await writer.drain()
            return
        self._sent += length
        if answer.file is None:
            writer.write(answer.body)
            await writer.drain()
            return
        await writer.drain()
        loop = asyncio.get_running_loop()
        with answer.file.open("rb") as file:
            at, end = answer.start, answer.start + length
            while at < end:
                nbytes = min(PIECE_BYTES, end - at)
                await rate.take(nbytes)
                await self._rate.take(nbytes)
                await loop.sendfile(writer.transport, file, at, nbytes)
                at += nbytes

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        name, _, text = target.partition("?")
        path, query = self._root / unquote(name).strip("/"), parse_qs(text, keep_blank_values=True)
        if method == "GET" and "list-type" in query:
            self._requests["LIST"] += 1
            return self._listed(path, query.get("prefix", [""])[0], query.get("start-after", [""])[0])
        self._requests[method] += 1
        if method == "PUT":
            return self._put(path, headers, body)
        if method == "DELETE":
            path.unlink(missing_ok=True)
            return Answer("204 No Content")
        if method == "POST" and "delete" in query:
            keys = [of.text or "" for of in ElementTree.fromstring(body).iter() if of.tag.endswith("Key")]
            for key in keys:
                (path / key).unlink(missing_ok=True)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return Answer("200 OK", body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if method in ("GET", "HEAD"):
            return self._read(path, headers.get("range"))
        return Answer("501 Not Implemented", body=b"<Error><Code>NotImplemented</Code></Error>")

    def _read(self, path: Path, asked: str | None) -> Answer:
        if not path.is_file():
            return Answer("404 Not Found", body=b"<Error><Code>NoSuchKey</Code></Error>")
        status = path.stat()
        headers = {"ETag": _etag(status), "Last-Modified": formatdate(status.st_mtime, usegmt=True)}
        start, end, size = 0, status.st_size, status.st_size
        if asked is None:
            return Answer("200 OK", headers, file=path, length=size)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if start >= size:
            return Answer("416 Range Not Satisfiable", body=b"<Error><Code>InvalidRange</Code></Error>")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return Answer("206 Partial Content", headers, file=path, start=start, length=end - start)

    @staticmethod
    def _put(path: Path, headers: dict[str, str], body: bytes) -> Answer:
        if headers.get("if-none-match") == "*" and path.exists():
            return Answer("412 Precondition Failed", body=b"<Error><Code>PreconditionFailed</Code></Error>")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        return Answer("200 OK", {"ETag": _etag(path.stat())})

    @staticmethod
    def _listed(bucket: Path, prefix: str, after: str) -> Answer:
        below = bucket / prefix.rpartition("/")[0]
        names = [str(path.relative_to(bucket)) for path in below.rglob("*") if path.is_file()] if below.exists() else []
        entries = []
        for name in sorted(n for n in names if n.startswith(prefix) and n > after and "#" not in n):
            status = (bucket / name).stat()
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            entries.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{modified}</LastModified>"
                f"<ETag>{escape(_etag(status))}</ETag><Size>{status.st_size}</Size></Contents>"
            )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
        return Answer("200 OK", {"Content-Type": "application/xml"}, text.encode())


def _etag(status: os.stat_result) -> str:
    return f'"{hashlib.md5(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()}"'


async def _main(root: Path, latency: float, bandwidth: float, of_connection: float) -> None:
    served = Server(root, latency, bandwidth, of_connection)
    server = await asyncio.start_server(served.serve, HOST, 0, limit=1 << 20, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.buffer.readline):
        print(json.dumps(served.told()), flush=True)
    server.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(Path(sys.argv[1]), *map(float, sys.argv[2:])))
