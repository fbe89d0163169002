"""A real S3-protocol server for tests, and a proxy before it that injects faults of the network and of the service.

The server is moto's, in a separate process. It can be switched to check credentials.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import unquote

_HOST = "127.0.0.1"
HANG = 300.0  # as in tests/patience.py: this file is run as a script too, without the tests package
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_CODES = {
    400: "RequestTimeout",
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True)
class Account:
    """A user of the server who may do everything."""

    access_key: str
    secret_key: str


class S3Server:
    """The server: ``endpoint`` is where, ``account`` who may use it while it checks credentials."""

    def __init__(self, port: int, account: Account, commands: IO[bytes], done: IO[bytes]) -> None:
        self.port = port
        self.endpoint = f"http://{_HOST}:{port}"
        self.account = account
        self._commands = commands
        self._done = done

    def make_bucket(self, name: str) -> None:
        """Make a bucket; there must be none of that name."""
        self._request("PUT", f"/{name}")

    def overwrite(self, bucket: str, key: str, data: bytes) -> None:
        """Write an object past the code under test, as another client would."""
        self._request("PUT", f"/{bucket}/{key}", data)

    def fill(self, bucket: str, keys: Sequence[str]) -> None:
        """Make many objects of one byte, without a request for each."""
        self._commands.write(json.dumps({"bucket": bucket, "keys": keys}).encode() + b"\n")
        self._commands.flush()
        assert self._done.readline() == b"done\n"

    @contextmanager
    def checking_credentials(self) -> Iterator[None]:
        """The server accepts only its account during this; otherwise it accepts every client."""
        self._request("POST", "/moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self._request("POST", "/moto-api/reset-auth", b"inf")

    def _request(self, method: str, path: str, body: bytes = b"") -> None:
        with closing(http.client.HTTPConnection(_HOST, self.port, timeout=30)) as connection:
            # A client without an account may not overwrite an object of another.
            connection.request(method, path, body, {"Authorization": "AWS any:any"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == 200, f"{method} {path}: {response.status} {text!r}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run the server in a separate process, which ends with its standard input: it never outlives the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "moto's server did not start"
        told = json.loads(line)
        account = Account(told["access_key"], told["secret_key"])
        yield S3Server(told["port"], account, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(90)  # this file is run as a script too, without the tests package
        process.stdout.close()


Kind = Literal["answer", "answer_after", "drop_before", "drop_after", "delay", "hold", "cut", "refuse", "hide"]


@dataclass
class Fault:
    """What happens to the next ``times`` requests with this method and with ``path`` in their address.

    - "answer": ``status``, without asking the server; with ``code`` in the body, if one is given.
    - "answer_after": the same once the server has carried the request out.
    - "drop_before": the connection breaks before the server has seen the request.
    - "drop_after": it breaks once the server has carried the request out: the answer is lost.
    - "delay": the answer comes ``seconds`` late.
    - "hold": the answer comes when ``let_go`` is set.
    - "cut": the connection breaks after the first ``keep`` bytes of the answer's body.
    - "refuse": of a bulk removal the first file stays; the answer is 200, and names that file with the code of
      ``status``.
    - "hide": a listing leaves out the files whose names the pattern ``hidden`` finds, as a stale one does.

    With ``token`` only requests with that session token are struck. ``skip`` requests that match pass unharmed first,
    and after each fault again if ``recurs``.
    """

    kind: Kind
    method: str = ""
    path: str = ""
    status: int = 503
    times: int = 1
    skip: int = 0
    recurs: bool = False
    seconds: float = 0.0
    keep: int = 0
    happened: int = 0
    code: str = ""
    token: str = ""
    hidden: str = ""
    let_go: threading.Event = field(default_factory=threading.Event, repr=False)
    _passed: int = field(default=0, repr=False)

    def strikes(self, method: str, path: str, token: str) -> bool:
        """Whether this request is struck; called once per request."""
        if self.happened >= self.times or (self.method and method != self.method) or self.path not in path:
            return False
        if (self.token and token != self.token) or (self.kind == "hide" and "list-type=" not in path):
            return False
        if self._passed < self.skip:
            self._passed += 1
            return False
        self.happened += 1
        if self.recurs:
            self._passed = 0
        return True


@dataclass(frozen=True)
class Seen:
    """A request that the proxy saw, and its outcome: the status that was answered, 0 for none."""

    method: str
    path: str
    headers: dict[str, str]
    status: int


class FaultProxy(ThreadingHTTPServer):
    """Forwards to the server, except as ``plan`` says: the first fault that strikes a request befalls it.

    With ``ignores_conditions`` it overwrites whatever is there, as some stores do that speak S3. While ``gate`` is not
    set, all requests wait at it; ``num_waiting`` says how many there are.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port_behind: int, host: str = _HOST, port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.endpoint = f"http://{_HOST}:{self.server_address[1]}"
        self.port_behind = port_behind
        self.plan: list[Fault] = []
        self.seen: list[Seen] = []
        self.ignores_conditions = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_waiting = 0
        self.lock = threading.Lock()
        # moto looks and writes in two steps; S3 does both in one, and that is what the code under test relies on.
        self.writing = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up: faults make them do so."""

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests with this method and with ``path`` in their address were seen."""
        return len([s for s in self.seen if (not method or s.method == method) and path in s.path])


@contextmanager
def fault_proxy(server: S3Server) -> Iterator[FaultProxy]:
    """Run a proxy before the server."""
    proxy = FaultProxy(server.port)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.gate.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()


class _Handler(BaseHTTPRequestHandler):
    # The client must not take the end of the connection for the end of the body.
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _handle(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path)
        if not proxy.gate.is_set():
            self._wait_at_the_gate()
        with proxy.lock:
            token = self.headers.get("x-amz-security-token", "")
            fault = next((f for f in proxy.plan if f.strikes(self.command, path, token)), None)
        kind = fault.kind if fault else None
        # One request per connection: whether a broken one was fresh or reused must make no difference.
        self.close_connection = True
        if fault is not None and kind == "answer":
            self._answer_error(path, fault)
            return
        if kind == "drop_before":
            self._hang_up(path)
            return
        refusal = b""
        if fault is not None and kind == "refuse":
            first = re.search(rb"<Object><Key>(.*?)</Key></Object>", body)
            assert first is not None, f"{self.command} {path} does not remove in bulk"
            body = body.replace(first[0], b"", 1)
            refusal = b"<Error><Key>%s</Key><Code>%s</Code><Message>Refused.</Message></Error>" % (
                first[1],
                _CODES[fault.status].encode(),
            )
        # The server answers 400 to a removal of nothing.
        done = (200, [], b"<DeleteResult></DeleteResult>") if refusal and b"<Key>" not in body else self._forward(body)
        status, headers, answer = done
        answer = answer.replace(b"</DeleteResult>", refusal + b"</DeleteResult>")
        if kind == "drop_after":
            self._hang_up(path)
            return
        if fault is not None and kind == "answer_after":
            self._answer_error(path, fault)
            return
        if fault is not None and kind == "hold":
            fault.let_go.wait(HANG)
        if fault is not None and kind == "hide":
            for entry in re.findall(rb"<Contents>.*?</Contents>", answer, re.DOTALL):
                if re.search(fault.hidden.encode(), entry):
                    answer = answer.replace(entry, b"")
        if fault is not None and kind == "delay":
            time.sleep(fault.seconds)
        self._answer(path, status, headers, answer, keep=fault.keep if fault is not None and kind == "cut" else None)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _wait_at_the_gate(self) -> None:
        with self.server.lock:
            self.server.num_waiting += 1
        self.server.gate.wait()
        with self.server.lock:
            self.server.num_waiting -= 1

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        with closing(http.client.HTTPConnection(_HOST, self.server.port_behind, timeout=30)) as connection:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                # Host is left as it came: it is signed.
                ignored = self.server.ignores_conditions and name.lower() == "if-none-match"
                if name.lower() not in _HOP_BY_HOP and not ignored:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            with self.server.writing if self.command in ("PUT", "POST") else nullcontext():
                connection.send(body)
                response = connection.getresponse()
                answer = response.read()
            return response.status, response.getheaders(), answer

    def _answer(
        self, path: str, status: int, headers: Sequence[tuple[str, str]], body: bytes, *, keep: int | None = None
    ) -> None:
        self._note(path, status)
        self.send_response_only(status)
        length = len(body)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = int(value)
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:keep])

    def _answer_error(self, path: str, fault: Fault) -> None:
        code = fault.code or _CODES[fault.status]
        text = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code></Error>".encode()
        self._answer(path, fault.status, [("Content-Type", "application/xml")], text)

    def _hang_up(self, path: str) -> None:
        self._note(path, 0)
        self.connection.shutdown(socket.SHUT_RDWR)

    def _note(self, path: str, status: int) -> None:
        with self.server.lock:
            self.server.seen.append(Seen(self.command, path, {k.lower(): v for k, v in self.headers.items()}, status))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests ask ``seen``."""


def _main() -> None:
    """Serve until standard input ends; says on standard output where, and who has an account."""
    import boto3  # type: ignore[import-untyped]
    from moto import backends
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    services = list(backends.list_of_moto_modules())  # moto looks at the directories of all services for each request
    backends.list_of_moto_modules = lambda: services
    server = ThreadedMotoServer(ip_address=_HOST, port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    iam = boto3.client(
        "iam",
        endpoint_url=f"http://{_HOST}:{port}",
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.create_user(UserName="tests")
    iam.put_user_policy(UserName="tests", PolicyName="everything", PolicyDocument=json.dumps(everything))
    key = iam.create_access_key(UserName="tests")["AccessKey"]
    told = {"port": port, "access_key": key["AccessKeyId"], "secret_key": key["SecretAccessKey"]}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        for name in command["keys"]:
            s3_backends["123456789012"]["aws"].put_object(command["bucket"], name, b"x")
        sys.stdout.write("done\n")
        sys.stdout.flush()
    os._exit(0)  # its thread may be serving a connection that is never closed


if __name__ == "__main__":
    _main()
