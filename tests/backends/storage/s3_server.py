"""An S3 server (moto's), and a proxy before it that fails as real storage does."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = str
"""``503``, ``500``, ``drop`` (before the server sees it), ``lose answer`` (after), ``cut`` (the answer)."""


@dataclass
class FaultyS3:
    """``fault(method, path)`` says what goes wrong with a request, None for nothing; ``requests`` are those seen."""

    endpoint: str = ""
    backend: tuple[str, int] = ("", 0)
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, *faults: Fault, method: str = "") -> None:
        """The next requests (of a method) fail in this order; then all is well."""
        plan = list(faults)

        def fault(seen: str, path: str) -> Fault | None:
            with self.lock:
                return plan.pop(0) if plan and method in ("", seen) else None

        self.fault = fault

    def fail_always(self, fault: Fault, method: str = "") -> None:
        """All requests (of a method) fail."""
        self.fault = lambda seen, path: fault if method in ("", seen) else None

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of Spark that lead to this server."""
        return {
            "spark.hadoop.fs.s3a.endpoint": self.endpoint,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": "key",
            "spark.hadoop.fs.s3a.secret.key": "secret",
        }

    def client(self) -> Any:
        """Return a client of the server itself, without faults."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://{self.backend[0]}:{self.backend[1]}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def put_all(self, bucket: str, prefix: str, root: Path) -> None:
        """Make a bucket with all files of a directory."""
        made = self.client()
        made.create_bucket(Bucket=bucket)
        for path in root.rglob("*"):
            if path.is_file():
                made.put_object(Bucket=bucket, Key=f"{prefix}/{path.relative_to(root)}", Body=path.read_bytes())

    def heal(self) -> None:
        """Nothing fails any more."""
        self.fault = lambda method, path: None


def _handler(state: FaultyS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in two pieces waits for the client's delayed acknowledgement, 40 ms
        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            return

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            state.requests.append((self.command, self.path))
            fault = state.fault(self.command, self.path)
            if fault == "drop":
                return self._hang_up()
            if fault in ("500", "503"):
                return self._answer(int(fault), [], b"<Error><Code>SlowDown</Code></Error>")
            upstream = http.client.HTTPConnection(*state.backend, timeout=30)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
            headers = [
                h
                for h in answer.getheaders()
                if h[0].lower() not in ("connection", "transfer-encoding", "server", "date")
            ]
            upstream.close()
            if fault == "lose answer":
                return self._hang_up()
            self._answer(answer.status, headers, content, cut=fault == "cut")

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self._hang_up()

        def _hang_up(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    return Handler


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """A server and its proxy, on free ports."""
    from moto.server import ThreadedMotoServer  # takes a second

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    state = FaultyS3(backend=(host, port))
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
