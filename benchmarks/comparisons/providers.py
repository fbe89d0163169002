"""The providers alone, without Spark and Ray, compared with raw rocksdict and the state of Quix Streams."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from suite.comparison import Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import directory

QUIX = "Quix Streams"
QUIX_VERSION = "quixstreams==3.28.1"
QUIX_ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-quix"


def _contestants(documented: dict[str, Any]) -> dict[str, Contestant]:
    settings = {name: str(value) for name, value in documented.items()}
    arrow, lists = "Arrow arrays to bytes and back", "lists of bytes, ready before"
    return {
        "rocksdb provider": Contestant("RocksDBStateStoreProvider", {}, True),
        "file provider": Contestant("FileStateStoreProvider", {}, True),
        "raw, Arrow": Contestant(f"rocksdict, raw_mode, as written; {arrow}", settings),
        "raw, lists": Contestant(f"the same; {lists}", settings),
        "raw flushed, Arrow": Contestant(f"rocksdict with its memory table flushed; {arrow}", settings),
        "raw flushed, lists": Contestant(f"the same; {lists}", settings),
        "raw synced, Arrow": Contestant(f"one write batch, its log synced as our commits are; {arrow}", settings),
        "raw synced, lists": Contestant(f"the same; {lists}", settings),
        "raw not synced, lists": Contestant(f"its log not synced; {lists}", settings),
        QUIX: Contestant(
            "set_bytes and get_bytes in a transaction, without a changelog topic; not synced", {QUIX_VERSION: ""}
        ),
    }


def run(size: Size, steps: Steps) -> Measured:
    """Measure get, scan and put, each in turns."""
    import numpy as np
    import store

    count, turns = size["keys"], size["turns"]
    rng = np.random.default_rng(20130101)
    measured = Measured()
    steps.expect(3)
    with directory() as root:
        held = store.Loaded(root / "held", count, rng)
        values = store.random_values(count, rng)
        try:
            columns = [held.keys, held.values, values]
            with _quix(root, columns, measured, steps) if size["quix"] else nullcontext() as quix:
                getters, scanners = store.getters(held), store.scanners(held)
                if quix is not None:
                    quix("fill 0")
                    getters[QUIX] = lambda: quix("get")
                steps.now(f"bulk get of {count:,} keys")
                _add(measured, f"bulk get of {count:,} sorted keys", store.take_turns(getters, turns))
                steps.advance()
                steps.now("full scan")
                _add(measured, "full scan in key order", store.take_turns(scanners, turns))
                steps.advance()
                steps.now("bulk put")
                times, putters = store.putters(root / "put", held.keys, [held.values, values])
                (root / "put").mkdir()
                if quix is not None:

                    def quix_put() -> float:
                        """Put all in one transaction into an empty store; "get" checks what "fill" writes so."""
                        assert quix is not None
                        times["empty state"].setdefault(QUIX, []).append(quix("put 0"))
                        return 0.0

                    putters[QUIX] = quix_put
                store.take_turns(putters, turns)
                for name, of_case in times.items():
                    _add(measured, f"bulk put and commit, {name}", of_case)
                steps.advance()
        finally:
            held.close()
    used = {name for case in measured.cases for name in case.turns}
    measured.contestants |= {n: c for n, c in _contestants(store.DOCUMENTED).items() if n in used}
    measured.notes.append(
        "8-byte keys, 24-byte values. Results of all were compared before they were timed, and puts after each turn. A "
        "commit of ours is durable: its changelog is synced."
    )
    return measured


def _add(measured: Measured, name: str, times: dict[str, list[float]]) -> None:
    turns = {contestant: [[s * 1e3] for s in seconds] for contestant, seconds in times.items()}
    measured.cases.append(Case(name, "ms", turns))


@contextmanager
def _quix(root: Path, columns: list[Any], measured: Measured, steps: Steps) -> Iterator[Callable[[str], float] | None]:
    """Give a process that takes commands on the state of Quix Streams; None, and a note why, if it cannot be made."""
    python = QUIX_ENVIRONMENT / "bin" / "python"
    ready = QUIX_ENVIRONMENT / ".installed"
    if not ready.exists():
        steps.say(f"making {QUIX_ENVIRONMENT.name} with {QUIX_VERSION}")
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(QUIX_ENVIRONMENT)], capture_output=True, text=True, check=False
        )
        if not made.returncode:
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", QUIX_VERSION]
            made = subprocess.run(install, capture_output=True, text=True, check=False)
        if made.returncode:
            lines = (made.stderr or made.stdout).strip().splitlines()
            measured.notes.append(
                f"{QUIX} is left out: {QUIX_VERSION} could not be installed "
                f"({lines[-1] if lines else 'no reason given'})."
            )
            yield None
            return
        ready.touch()
    pairs = root / "pairs"
    pairs.write_bytes(b"".join(_bytes(column) for column in columns))
    expected = hashlib.sha256(_bytes(columns[1])).hexdigest()
    script = Path(__file__).resolve().parents[1] / "quix_state.py"
    command = [str(python), "-W", "ignore", str(script), str(pairs), str(root / "quix")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def tell(line: str) -> float:
        assert process.stdin is not None and process.stdout is not None
        print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline().split()
        if not answer:
            raise RuntimeError(f"{QUIX} has ended at {line!r}; see its output above.")
        if line == "get" and answer[1] != expected:
            raise AssertionError(f"What {QUIX} has is not what it was given.")
        return float(answer[0])

    try:
        (root / "quix").mkdir()
        measured.notes.append(
            f"{QUIX} ({QUIX_VERSION}) runs in an environment of its own, for orientation: it is made for single keys, "
            "not bulk."
        )
        yield tell
    finally:
        process.stdin.close()
        process.wait(60)


def _bytes(column: Any) -> bytes:
    return b"".join(column.to_pylist())


COMPARISONS = (
    Comparison(
        name="provider",
        title="Providers alone beside raw rocksdict",
        about="One partition's state in one process, without Spark and Ray: bulk reads and scans of all keys, and bulk "
        "puts with a durable commit.",
        run=run,
        sizes={
            "full": {"keys": 1_000_000, "turns": 5, "quix": True},
            "smoke": {"keys": 50_000, "turns": 5, "quix": False},
        },
        minutes={"full": 15, "smoke": 6},
        targets=(
            Target(
                "`rocksdb` provider, put with changelog, against raw rocksdict that syncs its log",
                "bulk put and commit, empty state",
                "rocksdb provider",
                0.8,
                against="raw synced, lists",
                at_least=True,
            ),
            Target(
                "`rocksdb` provider, scan",
                "full scan in key order",
                "rocksdb provider",
                0.9,
                against="raw, lists",
                at_least=True,
            ),
        ),
        picture="bars",
    ),
)
