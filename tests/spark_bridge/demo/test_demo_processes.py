"""The demo's child processes, its display and its command line, without Ray or Spark."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from spark_bridge.cli.main import app
from spark_bridge.demo.app import LineDisplay, LiveDisplay, Record, choose_display
from spark_bridge.demo.events import (
    BatchCommitted,
    Failed,
    HostKilled,
    HostsPlaced,
    LookupAnswered,
    Progress,
    Started,
    Verified,
    decode_event,
    file_name,
)
from spark_bridge.demo.stream import Children
from tests.command_line import CliRunner
from tests.patience import PATIENCE

CHILD = """
import subprocess, sys, time
import msgspec
from spark_bridge.demo.events import EventPipe, Progress
from spark_bridge.demo.stream import end_with_parent

class Options(msgspec.Struct):
    events_fd: int

options = msgspec.json.decode(sys.argv[1], type=Options)
events = EventPipe(options.events_fd)
end_with_parent()
print("noise")
sleeper = "import os, time; print(os.environ.get('DEMO_EXTRA'), flush=True); time.sleep(600)"
command = [sys.executable, "-c", sleeper]
grandchild = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
events.send(Progress(f"{grandchild.pid} {grandchild.stdout.readline().strip()}"))
time.sleep(600)
"""


class Options(msgspec.Struct):
    events_fd: int


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "demo_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    return "demo_child"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_closing_ends_children_and_whatever_they_started(child_module: str, tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    children = Children(log_path, {"DEMO_EXTRA": "1"})
    children.start("child", child_module, Options)
    event = children.messages.get(timeout=PATIENCE)
    assert isinstance(event, Progress)
    # It says itself what it was given: /proc shows an empty environment for a moment after exec.
    grandchild, extra = event.text.split()
    assert extra == "1"
    children.close()
    wait_until_gone(int(grandchild))
    name, code = children.messages.get(timeout=PATIENCE)
    assert name == "child"
    assert code == 128 + 15  # it ended by itself, through SystemExit
    children.close()


def test_a_child_ends_when_its_parent_is_killed(child_module: str, tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        import msgspec, time
        from spark_bridge.demo.stream import Children
        class Options(msgspec.Struct):
            events_fd: int
        children = Children(Path({str(tmp_path / "log")!r}), {{}})
        children.start("child", {child_module!r}, Options)
        children.messages.get(timeout=60)
        print(children._processes["child"].pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    grandchildren = psutil.Process(child).children()
    parent.kill()
    parent.wait()
    wait_until_gone(child)
    for process in grandchildren:  # those only Children.close could have ended
        process.kill()


EVENTS = [
    Progress("starting Ray"),
    Started("127.0.0.1:1", 3, 50),
    BatchCommitted(4, 6_735, 8_900.4, 1_200, 3_000, 4, 756.0, 61.0),
    BatchCommitted(5, 6_735, 8_900.4, None, None, 5, 756.0, None),
    HostsPlaced({"10.0.0.1": 1, "10.0.0.2": 2}),
    HostKilled(4711, 25),
    LookupAnswered("N14228", "3 flights", 1.23),
    LookupAnswered("N00000", None, 0.7),
    Verified(4_044, 336_776, 4, 33.0),
]


def test_events_survive_the_pipe() -> None:
    for event in [*EVENTS, Failed("why")]:
        assert decode_event(msgspec.json.encode(event)) == event
    with pytest.raises(msgspec.DecodeError):
        decode_event(b'{"type":"Surprise"}')


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    display = choose_display(console, 50)
    assert isinstance(display, LineDisplay)
    with display:
        for event in EVENTS:
            display.show(event)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines == [
        "starting Ray ...",
        "Continuing after batch 3, which an earlier run committed.",
        "batch 4/50 | 6,735 rows | 8,900 rows/s | 1,200 aircraft touched | 3,000 in the state | "
        "checkpoint 4 | 756 ms, state 61 ms",
        "batch 5/50 | 6,735 rows | 8,900 rows/s | checkpoint 5 | 756 ms",
        "State hosts by machine: 10.0.0.1: 1, 10.0.0.2: 2",
        "kill -9 4711: that was a StateStoreHost, during batch 25.",
        "  lookup N14228: 3 flights (1.2 ms)",  # the second one came too soon after it
        "The state of all 4,044 aircraft (336,776 flights) is what pandas computes; "
        "4 unknown ones are not in it. Read back in 33 ms.",
    ]


def test_the_live_picture_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=140, force_terminal=True)
    display = choose_display(console, 50)
    assert isinstance(display, LiveDisplay)
    with display:
        for event in EVENTS:
            display.show(event)
    for text in ("batch 5/50", "N14228", "not seen yet", "kill -9 4711"):
        assert text in out.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--stop-after", "3"], "needs --checkpoint"),
        (["--machines", "4"], "needs --checkpoint DIR, a directory that all machines see"),
        (["--machines", "4", "--checkpoint", "x", "--kill-host"], "kills a process of this machine"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", "").split())


def test_another_replays_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flights").mkdir()
    (tmp_path / "flights" / file_name(0, 10)).touch()
    result = CliRunner().invoke(app, ["demo", "--checkpoint", str(tmp_path)])
    assert result.exit_code == 2
    assert "--batches 10" in result.output


def test_the_summary_leaves_the_warm_up_out() -> None:
    record = Record()
    assert record.summary(1.0) == "0 batches in 1 s, start and clean-up included."
    times = [(9000.0, 5000.0)] * 3 + [(500.0, 50.0), (500.0, None), (700.0, 70.0)]
    record.batches = [BatchCommitted(i, 10, 1.0, 1, 1, i, *t) for i, t in enumerate(times)]
    record.lookups_ms = [1.0, 3.0, 2.0]
    assert record.summary(61.4) == (
        "6 batches in 61 s, start and clean-up included. "
        "Median batch: 500 ms, 60 ms of it for state (10%). 3 lookups, median 2.0 ms."
    )
