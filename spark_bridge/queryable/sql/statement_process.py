"""SQL statements of other people, each in a process whose memory the operating system limits.

DuckDB does not count the values that one call of a function makes (``repeat``, a list of ``range``), so its own limit
does not cover them. ``RLIMIT_DATA`` of a child process does. The child runs the same ``sql`` as the user's own
program, with a client that asks this process for rows: names, pushdown and versions behave the same.

Two sockets connect the processes. On the first the child reports that it is ready, takes a statement (a line of JSON),
and answers with a line of JSON, an Arrow IPC stream and a second line, without which the answer is not complete. On the
second the child hands over one end of a new socket for each scan. This socket carries the request (a line of JSON, and
keys or bounds as an IPC stream), the version, and the rows as an IPC stream. A failed scan ends the child, because an
IPC stream that breaks off looks complete.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from spark_bridge import exceptions
from spark_bridge.queryable.protocol import WATERMARK, Comparison
from spark_bridge.queryable.sql.catalog import SqlClient, VersionedRows
from spark_bridge.queryable.sql.sql import SqlLimits, StatementDatabase, import_duckdb, spill_directory, sql

UNCOUNTED_BYTES = 192 << 20
"""Memory beyond a statement's limit, not counted by DuckDB: batches of scans and answers, stacks of threads."""
KEPT_PROCESSES = 2
"""At most this many processes wait for their next statement."""
IDLE_SECONDS = 60.0
MAX_GROWTH_BYTES = 64 << 20
"""A process that keeps more than this after a statement ends: its next statement would have less memory."""
PIECE_BYTES = 4 << 20
"""Answers come in batches of at most this size, or of one row."""
MAX_ROW_BYTES = 64 << 20
BATCH_ROWS = 8_192
READY = b"ready\n"
_ENVIRONMENT = {
    # Arrow's other allocators and OpenBLAS reserve memory that a statement could use in addition to its limit.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1",
}
_BOUNDS = ("prefix", "start", "end")


class ProcessStatement:
    """The answer of a statement that another process computes: batches to iterate over once.

    ``close`` must be called. It keeps the process for the next statement if this one is done, and else ends it.
    """

    def __init__(
        self,
        client: SqlClient,
        statement: str,
        *,
        query_params: Sequence[Any] | Mapping[str, Any] | None = None,
        version: int | None = None,
        at: dt.datetime | str | None = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
    ) -> None:
        self.client, self.timeout, self.limits = client, timeout, limits or SqlLimits()
        self.versions: dict[str, int] = {}
        """The version read, by query id."""
        self.times: dict[str, dt.datetime] = {}
        """The time of the rolling aggregates that were read, by query id."""
        self.failure: Exception | None = None
        """The first error in this process. It has precedence over an error that the child reports."""
        try:
            request = {"statement": statement, "query_params": query_params, "version": version, "at": _text_of_at(at)}
            request |= {"limits": asdict(self.limits), "operators": client.operators()}
            self._request = json.dumps(request).encode()
        except TypeError as error:
            raise exceptions.RequestError(f"Parameters of such a statement are JSON values: {error}.") from error
        self._is_closed = self._is_sent = self._is_done = False
        self._lock = threading.Lock()  # between ``end`` and ``close``
        self._process = _taken_process()
        self._process.statement = self

    def record_batches(self, batch_size: int = BATCH_ROWS) -> tuple[pa.Schema, ProcessStatement]:
        """Run the statement, and return its columns and the rows as they come, in batches of ``batch_size`` at most.

        Raises the errors of ``sql``, with ``RequestError`` for wrong SQL, and ``RequestLimitError`` also for a row that
        is too large.
        """
        try:
            self._process.wait_until_ready()
            with self._lock:
                if self.failure is not None:
                    raise self.failure
                self._is_sent = True
            self._process.send(self._request[:-1] + f', "batch_size": {batch_size}}}\n'.encode())
            self._read_line()
            self._reader = pa.ipc.open_stream(self._process.answers)
        except (OSError, pa.ArrowException) as error:
            failure = self._broken_off()
            self.close()
            raise failure from error
        except Exception:
            self.close()
            raise
        return self._reader.schema, self

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._is_done:
            raise StopIteration
        try:
            return self._reader.read_next_batch()
        except StopIteration:
            self._read_line()
            raise
        except (OSError, pa.ArrowException) as error:
            raise self._broken_off() from error

    def _read_line(self) -> None:
        """Read the line before or after the rows. Raises the error that it reports."""
        try:
            line = self._process.answers.readline()
        except OSError:
            line = b""
        if self.failure is not None or not line.endswith(b"\n"):
            raise self._broken_off()
        report = json.loads(line)
        self._is_done = "stays" in report
        self._process.is_reusable = report.get("stays", False)
        if "error" in report:
            raise exceptions.rebuilt_error(report["error"], report["message"])

    def _broken_off(self) -> Exception:
        """Return the reason why there is no more of the answer."""
        if self.failure is not None:
            return self.failure
        self._process.kill()
        code = self._process.popen.wait()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self._is_sent:
            return exceptions.EnvironmentProblemError(
                f"The process for SQL statements did not start ({cause}); its output says why."
            )
        return exceptions.RequestLimitError(
            f"The process of the statement ended ({cause}) before its answer was complete: it or the machine may have "
            f"run out of memory. The statement may use {self.limits.memory_bytes >> 20:,} MiB. Ask for less, have that "
            "limit raised (SqlLimits, sql_memory_bytes of the HTTP application, --sql-memory of 'statestore ui'), or "
            "give the machine more memory."
        )

    def end(self, reason: Exception) -> None:
        """End the statement, from any thread: threads that wait for it raise ``reason``, or an earlier error."""
        with self._lock:
            if not self._is_closed:
                self.failure = self.failure or reason
                # A process that still starts is kept. Else no statement would ever run where starting takes longer
                # than a statement may.
                if self._is_sent:
                    self._process.kill()

    def interrupt(self) -> None:
        """End the statement, from another thread."""
        self.end(exceptions.RequestError("The statement was ended before it was done."))

    def close(self) -> None:
        """Release the process. The statement is ended if it still runs."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._process.statement = None
            is_unharmed = self._is_done and self.failure is None
            _give_back(self._process, is_reusable=is_unharmed or not self._is_sent)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


# -- this process ----------------------------------------------------------------------------------


class _Process:
    """A process for statements, one at a time, and the thread that answers its scans and clears up after it."""

    def __init__(self) -> None:
        self.statement: ProcessStatement | None = None
        self.is_reusable = True
        self.idle_timer: threading.Timer | None = None
        self._is_ready = False
        self._directory = spill_directory() / uuid.uuid4().hex
        self._directory.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        self._scans, their_scans = socket.socketpair()
        with theirs, their_scans:
            arguments = (theirs.fileno(), their_scans.fileno(), str(self._directory))
            command = f"from {__name__} import run_statements; run_statements{arguments!r}"
            paths = os.pathsep.join(map(os.path.abspath, sys.path))
            self.popen = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                cwd=self._directory,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": paths, "TMPDIR": str(self._directory)},
                pass_fds=(theirs.fileno(), their_scans.fileno()),
            )
        self._statements = ours
        self.answers = ours.makefile("rb")
        threading.Thread(target=self._serve_scans, name="statestore-sql-scans", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until the process has started. Raises ``ConnectionError`` if it has ended."""
        if not self._is_ready:
            self._is_ready = self.answers.readline() == READY
            if not self._is_ready:
                raise ConnectionError("the process has ended")

    def send(self, line: bytes) -> None:
        self._statements.sendall(line)

    def kill(self) -> None:
        self.popen.kill()

    def _serve_scans(self) -> None:
        # A process that was killed may leave a reset connection.
        with self._scans, contextlib.suppress(ConnectionError):
            while descriptors := socket.recv_fds(self._scans, 1, 1)[1]:
                args = (self.statement, socket.socket(fileno=descriptors[0]))
                threading.Thread(target=self._answer, args=args, name="statestore-sql-scan", daemon=True).start()
        self.popen.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answer(self, statement: ProcessStatement | None, scan: socket.socket) -> None:
        """Answer one scan. An error ends the statement."""
        if statement is None:  # it has ended
            scan.close()
            return
        try:
            # The process closes a scan whose further rows it does not need.
            with contextlib.suppress(ConnectionError), scan, scan.makefile("rb") as request, scan.makefile("wb") as out:
                with _ending(statement):
                    rows = _opened(statement, request)
                with contextlib.closing(rows):
                    out.write(rows.version.to_bytes(8, "little", signed=True))
                    with pa.ipc.new_stream(out, rows.schema) as writer:
                        out.flush()
                        for batch in _ending_rows(statement, rows):
                            writer.write_batch(batch)
                            out.flush()
        except Exception as error:  # noqa: BLE001 - the statement raises it
            statement.end(error)


@contextlib.contextmanager
def _ending(statement: ProcessStatement) -> Iterator[None]:
    """End a statement by the error that ends the block, before its process can take that for the end of the rows."""
    try:
        yield
    except Exception as error:
        statement.end(error)
        raise


def _ending_rows(statement: ProcessStatement, rows: VersionedRows) -> Iterator[pa.RecordBatch]:
    with _ending(statement):
        yield from rows


def _opened(statement: ProcessStatement, request: Any) -> VersionedRows:
    """Begin the scan that a process asks for."""
    asked = json.loads(request.readline())
    if "at" in asked:
        asked["at"] = _at_of_text(asked["at"])
    with pa.ipc.open_stream(request) as reader:
        keys = reader.read_next_batch()
    where, operator, state, is_lookup = (asked.pop(name) for name in ("where", "operator", "state", "is_lookup"))
    if is_lookup:
        rows = statement.client.key_rows(operator, keys, state, timeout=statement.timeout, **asked)
    else:
        (row,) = keys.to_pylist() if keys.num_columns else ({},)
        bounds: dict[str, Any] = {
            bound: tuple(value for name, value in row.items() if name.split()[0] == bound) or None for bound in _BOUNDS
        }
        conditions = [Comparison(*condition) for condition in where]
        rows = statement.client.scan(operator, state, where=conditions, timeout=statement.timeout, **bounds, **asked)
    statement.versions.setdefault(asked["query"], rows.version)
    if rows.at is not None:
        statement.times[asked["query"]] = rows.at
    return rows


def _text_of_at(at: dt.datetime | str | None) -> str | None:
    if at is not None and at != WATERMARK and not isinstance(at, dt.datetime):
        raise exceptions.RequestError(f"at={at!r} is neither a datetime nor 'watermark'.")
    return at.isoformat() if isinstance(at, dt.datetime) else at


def _at_of_text(text: str | None) -> dt.datetime | str | None:
    return text if text is None or text == WATERMARK else dt.datetime.fromisoformat(text)


_idle: list[_Process] = []
_idle_lock = threading.Lock()


def _taken_process() -> _Process:
    """Return a process that waits for a statement, or a new one."""
    with _idle_lock:
        while _idle:
            process = _idle.pop()
            if process.idle_timer is not None:
                process.idle_timer.cancel()
            if process.popen.poll() is None:
                return process
    return _Process()


def _give_back(process: _Process, *, is_reusable: bool) -> None:
    """Keep a process for the next statement. Another takes the place of one that cannot be used again.

    It starts now, so that the next statement does not wait for the start.
    """
    if not (is_reusable and process.is_reusable):
        process.kill()
        if len(_idle) >= KEPT_PROCESSES or sys.is_finalizing():
            return
        process = _Process()
    process.idle_timer = threading.Timer(IDLE_SECONDS, _retire, [process])
    process.idle_timer.daemon = True
    with _idle_lock:
        if len(_idle) >= KEPT_PROCESSES:
            process.kill()
            return
        _idle.append(process)
    process.idle_timer.start()


def _retire(process: _Process) -> None:
    with _idle_lock:
        if process in _idle:
            _idle.remove(process)
            process.kill()


@atexit.register
def end_idle_processes() -> None:
    """End the processes that wait for a statement."""
    with _idle_lock:
        while _idle:
            process = _idle.pop()
            process.kill()
            process.popen.wait()


# -- the process of a statement --------------------------------------------------------------------


def run_statements(statements_fd: int, scans_fd: int, directory: str) -> None:
    """Run one statement after the other until the parent process goes away.

    ``directory`` is that of this process, for temporary files; it goes with the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with contextlib.suppress(OSError):
        # If memory runs out, Linux should end this process rather than its parent.
        Path("/proc/self/oom_score_adj").write_text("1000")
    scans = socket.socket(fileno=scans_fd)
    threading.Thread(target=_exit_with_parent, args=(scans, directory), daemon=True).start()
    with contextlib.suppress(exceptions.SparkBridgeError):  # the statement reports that DuckDB is not installed
        import_duckdb().connect(":memory:", config={"threads": 1}).sql("select 1").to_arrow_table()
    grown = _memory("VmRSS") + MAX_GROWTH_BYTES
    with contextlib.suppress(ConnectionError), socket.socket(fileno=statements_fd).makefile("rwb") as file:
        file.write(READY)
        file.flush()
        for line in file:
            request = json.loads(line)
            limits = SqlLimits(**request["limits"])
            with contextlib.suppress(exceptions.SparkBridgeError):
                # The statement finds its database and the threads of that made, so they do not count for it.
                StatementDatabase(import_duckdb(), limits, may_share=True)
            end = _run(request, limits, scans, file)
            end["stays"] = _memory("VmRSS") <= grown
            file.write(json.dumps(end).encode() + b"\n")
            file.flush()
    os._exit(0)


def _exit_with_parent(scans: socket.socket, directory: str) -> None:
    with contextlib.suppress(ConnectionError):
        scans.recv(1)  # the parent sends nothing: this returns at its end
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _memory(kind: str) -> int:
    """Return the memory of this process; ``VmData`` counts against ``RLIMIT_DATA``. 0 on systems other than Linux."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return 0
    return int(status.partition(f"{kind}:")[2].split()[0]) << 10


def _run(request: dict[str, Any], limits: SqlLimits, scans: socket.socket, file: Any) -> dict[str, Any]:
    """Run a statement within its limits, and write its answer. Return the error, if there is one."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    try:
        if base := _memory("VmData"):
            limit = base + limits.memory_bytes + UNCOUNTED_BYTES
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
        relation = sql(
            _ParentClient(request["operators"], scans),
            request["statement"],
            query_params=request["query_params"],
            version=request["version"],
            at=_at_of_text(request["at"]),
            limits=limits,
        )
        schema, batches = relation.record_batches(request["batch_size"])
        file.write(b"{}\n")
        with pa.ipc.new_stream(file, schema) as writer:
            file.flush()
            for batch in batches:
                for piece in _pieces(batch):
                    writer.write_batch(piece)
                    file.flush()
    except ConnectionError:  # the parent is gone
        raise
    except Exception as error:  # noqa: BLE001 - the parent raises it
        if isinstance(error, MemoryError):
            error = limits.exceeded(error)
        is_known = isinstance(error, exceptions.SparkBridgeError)
        return {"error": type(error).__name__ if is_known else exceptions.RequestError.__name__, "message": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return {}


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces of at most ``PIECE_BYTES``. Raises ``RequestLimitError`` for a row that is too large."""
    if batch.nbytes <= PIECE_BYTES:
        yield batch
    elif batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half))
        yield from _pieces(batch.slice(half))
    elif batch.nbytes > MAX_ROW_BYTES:
        raise exceptions.RequestLimitError(
            f"A row of the answer has {batch.nbytes >> 20} MiB; at most {MAX_ROW_BYTES >> 20} MiB are possible. Ask "
            "for fewer columns, or for a part of the value."
        )
    else:
        yield batch


class _ParentClient:
    """The client in the process of a statement: it asks the parent process for rows."""

    def __init__(self, operators: list[dict[str, Any]], scans: socket.socket) -> None:
        self._operators = operators
        self._scans = scans

    def operators(self) -> list[dict[str, Any]]:
        return self._operators

    def now(self) -> dt.datetime:
        return dt.datetime.now(dt.timezone.utc)

    def scan(
        self, operator: str, state: str | None, *bounds: Any, where: Sequence[Comparison], **asked: Any
    ) -> VersionedRows:
        values_of_bounds = {
            f"{bound} {number}": value
            for bound, values in zip(_BOUNDS, bounds, strict=True)
            for number, value in enumerate(values or ())
        }
        where_json = msgspec.to_builtins(where)
        return self._asked(operator, state, asked, pa.RecordBatch.from_pylist([values_of_bounds]), where=where_json)

    def key_rows(self, operator: str, keys: pa.RecordBatch, state: str | None, **asked: Any) -> VersionedRows:
        return self._asked(operator, state, asked, keys, is_lookup=True)

    def _asked(
        self,
        operator: str,
        state: str | None,
        asked: dict[str, Any],
        keys: pa.RecordBatch,
        *,
        where: Sequence[Any] = (),
        is_lookup: bool = False,
    ) -> VersionedRows:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(self._scans, [b"s"], [theirs.fileno()])
            file = ours.makefile("rwb")
        del asked["timeout"]  # the parent has it
        if "at" in asked:
            asked["at"] = _text_of_at(asked["at"])
        request = {"operator": operator, "state": state, "where": where, "is_lookup": is_lookup, **asked}
        file.write(json.dumps(request).encode() + b"\n")
        with pa.ipc.new_stream(file, keys.schema) as writer:
            writer.write_batch(keys)
        file.flush()
        return _ParentRows(file)


class _ParentRows:
    """Rows that the parent process sends."""

    def __init__(self, file: Any) -> None:
        self._file = file
        version = file.read(8)
        if len(version) < 8:
            # The parent has its error.
            raise exceptions.ConnectionClosedError("The scan of a SQL statement has failed.")
        self.version = int.from_bytes(version, "little", signed=True)
        self.at: dt.datetime | None = None  # the parent notes it
        self._reader = pa.ipc.open_stream(file)
        self.schema = self._reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return iter(self._reader)

    def close(self) -> None:
        self._file.close()
