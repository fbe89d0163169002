"""Two servers that speak the S3 protocol, count requests, and delay answers on command; each is a process.

``proxied_s3`` is moto's server, as in the tests, behind a proxy that adds ``delay`` seconds to a request before the
server sees it, and ten times as much to one request of 200 with ``tail``: each bucket has its own delay and its own
counts. The time of the server itself is added to that, so that figures at no delay are those of moto.

moto copies every object through Python several times, so it cannot send 200 MB a second. ``file_s3`` is a server that
sends files of a directory with ``sendfile``. Each request waits ``latency`` seconds before its answer, and all answers
together have ``bandwidth`` bytes a second. Buckets are directories below the root.

    python benchmarks/slow_s3.py proxy PORT                         the proxy, before a server on that port
    python benchmarks/slow_s3.py files ROOT LATENCY BANDWIDTH       the server of files

Both print their port; commands are lines of standard input, as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
TAIL_SHARE, TAIL_TIMES = 0.005, 10
PIECE_BYTES = 128 << 10
BURST_SECONDS = 0.01
"""Bandwidth that was not used for this long may be used later."""


@dataclass
class Traffic:
    """The traffic since the last look: requests by kind, and the bytes of content in both directions."""

    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0


class SlowS3:
    """A running server. ``direct`` is the address behind the proxy, where nothing is counted."""

    def __init__(self, *arguments: str, direct: str = "") -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint, self.direct = f"http://{HOST}:{self._answer()}", direct

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket; there must be none of that name."""
        connection = http.client.HTTPConnection(self.direct.removeprefix("http://"), timeout=30)
        with closing(connection):
            connection.request("PUT", f"/{bucket}", headers={"Authorization": "AWS any:any"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"The bucket {bucket!r} was not made: {answer.status} {answer.read()!r}")

    def options(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the storage options that connect to the server, by default through the proxy."""
        given = {"endpoint": endpoint or self.endpoint, "path.style.access": "true"}
        return {f"fs.s3a.{name}": value for name, value in (given | {"access.key": "any", "secret.key": "any"}).items()}

    def slow_down(self, bucket: str, delay: float, tail: bool = False) -> None:
        """Have each request to a bucket take ``delay`` seconds longer from now on."""
        self._tell({"bucket": bucket, "delay": delay, "tail": tail})

    def traffic(self, bucket: str = "") -> Traffic:
        """Return what has gone through to a bucket since the last call; the server of files has one count for all."""
        told = self._tell({"bucket": bucket})
        return Traffic(Counter(told["requests"]), told["sent"], told["received"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _tell(self, command: Mapping[str, Any]) -> Any:
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def proxied_s3() -> Iterator[SlowS3]:
    """Run a server and a proxy before it; both end with the block."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.backends.storage.s3_faults import s3_server

    with s3_server() as server, proxy_before(server.port) as proxied:
        yield proxied


def proxy_before(port: int) -> closing[SlowS3]:
    """Run a proxy before the server on ``port``; it ends with the block."""
    return closing(SlowS3("proxy", str(port), direct=f"http://{HOST}:{port}"))


def file_s3(root: Path, latency: float, bandwidth: float) -> closing[SlowS3]:
    """Serve the directories below ``root`` as buckets; the server ends with the block."""
    return closing(SlowS3("files", str(root), str(latency), str(bandwidth)))


# -- what both processes do


@dataclass(frozen=True)
class Request:
    """A request: its content is ``body``, its first lines as they came are ``head``."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    head: bytes


class Server(ABC):
    @abstractmethod
    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""

    @abstractmethod
    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command of the benchmark, and return the answer to it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, headers = parsed(head)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ", 2)
                await self.answer(Request(method, target, headers, body, head), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has hung up, or the server ends
        finally:
            writer.close()

    async def run(self) -> None:
        """Print the port, and carry out commands until the end of standard input."""
        server = await asyncio.start_server(self.serve, HOST, 0, limit=1 << 20, backlog=512)
        print(server.sockets[0].getsockname()[1], flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(self.obey(json.loads(line))), flush=True)
        server.close()


def parsed(head: bytes) -> tuple[str, dict[str, str]]:
    line, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (x.partition(":") for x in rest)
    return line, {name.lower(): value.strip() for name, _, value in pairs}


# -- the proxy


@dataclass
class Bucket:
    delay: float = 0.0
    tail: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    def seconds(self) -> float:
        slow = self.tail and random.random() < TAIL_SHARE
        return self.delay * (TAIL_TIMES if slow else 1)


class Proxy(Server):
    """Forwards requests. Memory grows with the requests under way and their bodies."""

    def __init__(self, port_behind: int) -> None:
        self._port_behind = port_behind
        self._buckets: dict[str, Bucket] = defaultdict(Bucket)

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        bucket = self._buckets[command["bucket"]]
        if "delay" in command:
            bucket.delay, bucket.tail = command["delay"], command["tail"]
            return {}
        told, bucket.traffic = bucket.traffic, Traffic()
        return vars(told)

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        bucket = self._buckets[request.target.lstrip("/").replace("?", "/").partition("/")[0]]
        bucket.traffic.requests[kind_of(request.method, request.target)] += 1
        bucket.traffic.sent += len(request.body)
        await asyncio.sleep(bucket.seconds())
        answer, received = await self._forward(request)
        bucket.traffic.received += received
        writer.write(answer)

    async def _forward(self, request: Request) -> tuple[bytes, int]:
        reader, writer = await asyncio.open_connection(HOST, self._port_behind)
        try:
            lines = request.head[:-4].split(b"\r\n")
            kept = [x for x in lines if not x.lower().startswith((b"connection:", b"expect:"))]
            writer.write(b"\r\n".join((*kept, b"Connection: close")) + b"\r\n\r\n" + request.body)
            await writer.drain()
            top = (await reader.readuntil(b"\r\n\r\n"))[:-4]
            _, headers = parsed(top)
            if "transfer-encoding" in headers:
                raise ValueError(f"moto answered in chunks, which this proxy does not read: {top!r}")
            if request.method == "HEAD":
                content = b""
            elif "content-length" in headers:  # moto closes the connection some 10 ms behind the last byte
                content = await reader.readexactly(int(headers["content-length"]))
            else:
                content = await reader.read(-1)
        finally:
            writer.close()
        lines = [x for x in top.split(b"\r\n") if not x.lower().startswith(b"connection:")]
        lines[0] = lines[0].replace(b"HTTP/1.0", b"HTTP/1.1")
        if "content-length" not in headers and request.method != "HEAD":
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


# -- the server of files


@dataclass
class Answer:
    """An answer with ``body``, or with ``length`` bytes of a file from ``start`` on."""

    status: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None
    start: int = 0
    length: int = 0


class FileServer(Server):
    def __init__(self, root: Path, latency: float, bandwidth: float) -> None:
        self._root, self._latency, self._bandwidth = root, latency, bandwidth
        self._free_at = 0.0
        self._traffic = Traffic()

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        told, self._traffic = self._traffic, Traffic()
        return vars(told)

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._latency)
        answer = self._answer(request)
        length = answer.length if answer.file is not None else len(answer.body)
        lines = [f"HTTP/1.1 {answer.status}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        if request.method == "HEAD":
            return
        self._traffic.received += length
        writer.write(answer.body)
        await writer.drain()
        if answer.file is not None:
            with answer.file.open("rb") as file:
                for at in range(answer.start, answer.start + length, PIECE_BYTES):
                    nbytes = min(PIECE_BYTES, answer.start + length - at)
                    await self._take(nbytes)
                    await asyncio.get_running_loop().sendfile(writer.transport, file, at, nbytes)

    async def _take(self, nbytes: int) -> None:
        """Wait for the share of the bandwidth: first come, first served."""
        start = max(self._free_at, time.monotonic() - BURST_SECONDS)
        self._free_at = start + nbytes / self._bandwidth
        if (wait := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    def _answer(self, request: Request) -> Answer:
        method = request.method
        name, _, text = request.target.partition("?")
        path, query = self._root / unquote(name).strip("/"), parse_qs(text, keep_blank_values=True)
        if method == "GET" and "list-type" in query:
            self._traffic.requests["LIST"] += 1
            return self._listed(path, query.get("prefix", [""])[0], query.get("start-after", [""])[0])
        self._traffic.requests[method] += 1
        if method == "PUT":
            return self._put(path, request)
        if method == "DELETE":
            path.unlink(missing_ok=True)
            return Answer("204 No Content")
        if method == "POST" and "delete" in query:
            keys = [of.text or "" for of in ElementTree.fromstring(request.body).iter() if of.tag.endswith("Key")]
            for key in keys:
                (path / key).unlink(missing_ok=True)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return Answer("200 OK", body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if method in ("GET", "HEAD"):
            return self._read(path, request.headers.get("range"))
        return Answer("501 Not Implemented", body=b"<Error><Code>NotImplemented</Code></Error>")

    @staticmethod
    def _read(path: Path, asked: str | None) -> Answer:
        if not path.is_file():
            return Answer("404 Not Found", body=b"<Error><Code>NoSuchKey</Code></Error>")
        status = path.stat()
        headers, size = (
            {"ETag": _etag(status), "Last-Modified": formatdate(status.st_mtime, usegmt=True)},
            status.st_size,
        )
        if asked is None:
            return Answer("200 OK", headers, file=path, length=size)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if start >= size:
            return Answer("416 Range Not Satisfiable", body=b"<Error><Code>InvalidRange</Code></Error>")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return Answer("206 Partial Content", headers, file=path, start=start, length=end - start)

    @staticmethod
    def _put(path: Path, request: Request) -> Answer:
        if request.headers.get("if-none-match") == "*" and path.exists():
            return Answer("412 Precondition Failed", body=b"<Error><Code>PreconditionFailed</Code></Error>")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(request.body)
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


if __name__ == "__main__":
    kind, first, *rest = sys.argv[1:]
    with suppress(KeyboardInterrupt):
        asyncio.run((Proxy(int(first)) if kind == "proxy" else FileServer(Path(first), *map(float, rest))).run())
