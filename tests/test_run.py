"""The runner of the suite: what fails is not passed over, and times are said."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import installed, matrix, run
from tests.run import Outcome, Part, report, run_part, run_steps, spoken


def python(name: str, code: str, **rest: Any) -> Part:
    return Part(name, [sys.executable, "-c", code], **rest)


@pytest.mark.parametrize(("status", "is_right"), [(0, True), (5, True), (1, False), (2, False), (-9, False)])
def test_the_last_line_of_pytest(status: int, is_right: bool) -> None:
    code = "import os; os.kill(os.getpid(), 9)" if status < 0 else f"raise SystemExit({status})"
    outcome = run_part(python("one", code), io.StringIO())
    assert (outcome.status, outcome.is_right) == (status, is_right)


def test_parts_of_a_step_run_side_by_side_and_have_their_names_before_their_lines(tmp_path: Path) -> None:
    """Each waits for the other."""
    wait = "import os, sys, time\nopen({0!r}, 'w')\nwhile not os.path.exists({1!r}): time.sleep(0.01)\n"
    wait += (
        "print(os.environ['RAY_TMPDIR'])\nprint('===== {2} =====', file=sys.stderr)\nprint('leaked', file=sys.stderr)"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    out = io.StringIO()
    parts = [python("A", wait.format(a, b, "3 passed")), python("B", wait.format(b, a, "4 passed"))]
    outcomes = run_steps([parts], out)
    assert [o.last_line for o in outcomes] == ["3 passed", "4 passed"]
    lines = out.getvalue().splitlines()
    assert len(lines) == 6 and {line.split(" | ")[0] for line in lines} == {"A", "B"}
    directories = {line.split(" | ")[1] for line in lines if "/rs-" in line}
    assert len(directories) == 2 and not any(Path(d).exists() for d in directories)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="This system keeps no process to a core.")
def test_a_part_and_its_children_keep_to_their_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    ask = "import os; print('==', *sorted(os.sched_getaffinity(0)))"
    # The process gets its core some time after its start: it polls until then, and starts its child afterwards.
    told = "import os, subprocess, sys, time\nuntil = time.monotonic() + 120\n"
    told += "while len(os.sched_getaffinity(0)) > 1 and time.monotonic() < until: pass\n"
    told += f"subprocess.run([sys.executable, '-c', {ask!r}])"
    for core in (0, len(cores) + 1):
        outcome = run_part(Part("kept", [sys.executable, "-c", told], core=core), io.StringIO())
        assert outcome.last_line == str(cores[core % len(cores)])
    assert run_part(python("free", ask), io.StringIO()).last_line == " ".join(map(str, cores))


def test_a_part_begins_once_those_before_it_have_ended(tmp_path: Path) -> None:
    first = python("first", f"import pathlib, time; time.sleep(0.5); pathlib.Path({str(tmp_path / 'done')!r}).touch()")
    look = f"import pathlib; raise SystemExit(not pathlib.Path({str(tmp_path / 'done')!r}).exists())"
    second = replace(python("second", look), after=("first",))
    assert [o.status for o in run_steps([[first, second]], io.StringIO())] == [0, 0]


def test_a_failure_ends_the_run_after_its_step() -> None:
    good, bad, never = python("good", ""), python("bad", "raise SystemExit(1)"), python("never", "")
    outcomes = run_steps([[good], [bad, good], [never]], io.StringIO())
    assert [o.part.name for o in outcomes] == ["good", "bad", "good"]
    assert "FAILED" in report(outcomes, 1.0, None)


def test_the_report_repeats_the_names_of_failed_tests(tmp_path: Path) -> None:
    """The names follow the lines of slower parts. An error that a test logs is not a failed test."""
    wrong = "import logging\n\ndef test_wrong():\n    logging.error('lost')\n    assert 1 == 2\n\n"
    (tmp_path / "test_one.py").write_text(f"{wrong}def test_right():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    outcomes = run_steps([[Part("tested", command), python("other", "print('FAILED')")]], io.StringIO())
    lines = report(outcomes, 1.0, None).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("tested: FAILED ") and lines[0].endswith("test_one.py::test_wrong - assert 1 == 2")
    assert lines[1].startswith("tested ") and "1 failed, 1 passed" in lines[1]


def test_the_report() -> None:
    parts = Part("without clusters", []), Part("Spark 3.5", [])
    outcomes = [Outcome(parts[0], 0, 48.4, "3000 passed"), Outcome(parts[1], 0, 425.0, "150 passed")]
    assert report(outcomes, 473.0, 600.0).splitlines() == [
        "without clusters           48 s  3000 passed",
        "Spark 3.5            7 min 05 s  150 passed",
        "in all               7 min 53 s  (bound 10 min 00 s)  right",
    ]
    assert [spoken(s) for s in (0.2, 59.4, 59.6)] == ["0 s", "59 s", "1 min 00 s"]


def test_the_status_is_that_of_the_tests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for status in (0, 1):
        step = [python("part", f"print({status} or 'passed'); raise SystemExit({status})")]
        monkeypatch.setattr(run, "steps_of", lambda *_, step=step: [step])
        assert run.main([]) == status
        assert "in all" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize("marks", list(product([0, 1], repeat=4)))
def test_each_test_of_clusters_runs_on_both_lines_of_spark(line: int, marks: tuple[int, ...]) -> None:
    """By the usual run or the thorough one; by the usual one on one line at least, unless it is marked ``thorough``."""
    given = dict(zip(("ray", "spark42", "spark42_only", "thorough"), marks, strict=True)) | {"spark": not marks[0]}
    if given["spark42"] and given["spark42_only"]:
        return  # "on both" and "on one"
    given["service"] = False
    usual = [not given["thorough"] and bool(eval(of, {}, given)) for of, _ in run.LINES_AND_THEIR_REST]
    thorough = [bool(eval(of, {}, given)) for _, of in run.LINES_AND_THEIR_REST]
    assert usual[line] != thorough[line]
    assert any(usual) != given["thorough"]
    assert all(usual) == (given["spark42"] and not given["thorough"])


@pytest.mark.parametrize("marks", list(product([0, 1], repeat=4)))
def test_each_test_of_services_runs_with_services_only(marks: tuple[int, ...]) -> None:
    """Once without clusters; with Spark on 3.5, on 4.2, or on both."""
    given = dict(zip(("ray", "spark", "spark42", "spark42_only"), marks, strict=True))
    given |= {"service": True, "thorough": False, "browser": False}
    if (given["spark42"] and given["spark42_only"]) or (given["spark42"] or given["spark42_only"]) > given["spark"]:
        return
    usual = [*run.steps_of(False, []), *run.steps_of_slow([])]
    chosen = [p.command[p.command.index("-m", 3) + 1] for step in usual for p in step]
    assert not any(eval(of, {}, {**given, "slow": slow}) for of in chosen for slow in (False, True))
    assert sum(bool(eval(of, {}, given)) for of in run.SERVICES) == 1 + given["spark42"]


@pytest.mark.parametrize("given", [["--without-clusters", "-x"], ["--thorough", "--without-clusters", "-x"]])
def test_a_run_without_clusters_has_all_tests_without(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    ran: list[Part] = []
    monkeypatch.setattr(run, "run_steps", lambda steps, out: ran.extend(p for step in steps for p in step) or [])
    assert run.main(given) == 0
    assert [p.name for p in ran] == [*run.WITHOUT_CLUSTERS, *run.AROUND]
    assert all("not ray and not spark" in " ".join(p.command) for p in ran)


def test_each_file_without_clusters_is_in_one_part() -> None:
    parts = (run.WITHOUT_CLUSTERS | run.AROUND).values()
    for path in (run.ROOT / "tests").rglob("test_*.py"):
        at = [path, *path.parents]
        given = [
            any(run.ROOT / place in at for place in of if not place.startswith("--"))
            and not any(run.ROOT / place.removeprefix("--ignore=") in at for place in of if place.startswith("--"))
            for of in parts
        ]
        assert sum(given) == 1, path


def test_each_test_without_clusters_runs_once() -> None:
    """By the usual run or with the slow ones; a thorough run has both in its first step."""
    for is_thorough in (False, True):
        steps = [*run.steps_of(is_thorough, []), *([] if is_thorough else run.steps_of_slow([]))]
        chosen = [p.command[p.command.index("-m", 3) + 1] for step in steps for p in step if "pytest" in p.command]
        for browser, slow in product((False, True), repeat=2):
            given = {
                "ray": False,
                "spark": False,
                "spark42": False,
                "spark42_only": False,
                "thorough": False,
                "service": False,
                "slow": slow,
            }
            ran = {of for of in chosen if eval(of, {}, {**given, "browser": browser})}
            assert len(ran) == 1, (is_thorough, browser, slow, ran)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("line", ["", "spark42", "spark42_only"])
def test_a_test_of_clusters_is_run_by_the_usual_run_or_with_the_slow_ones(is_slow: bool, line: str) -> None:
    """Once on each of its lines of Spark: on Spark 3.5 by the usual run unless it is slow, on Spark 4.2 with these."""
    names = ("ray", "spark42", "spark42_only", "service", "thorough", "browser")
    given = dict.fromkeys(names, False) | {"spark": True, "slow": is_slow} | ({line: True} if line else {})
    usual, slow = (
        [p.name for p in step if eval(p.command[p.command.index("-m", 3) + 1], {}, given)]
        for step in (run.steps_of(False, [])[0], run.steps_of_slow([])[0])
    )
    on_35 = [] if line == "spark42_only" else ["Spark 3.5"]
    on_42 = ["Spark 4.2"] if line else []
    assert (usual, slow) == ([], on_35 + on_42) if is_slow else (on_35, on_42)


def test_all_parts_of_a_thorough_run_are_thorough() -> None:
    for parts in run.steps_of(True, ["-x"]):
        for part in parts:
            assert part.environment == {"STATESTORE_TEST_EFFORT": "thorough"} and part.command[-1] == "-x"
    assert all(not p.environment for parts in run.steps_of(False, []) for p in parts)


def test_a_thorough_run_of_everything_searches_the_simulation() -> None:
    commands = [list(p.command[1:]) for parts in run.steps_of(True, []) for p in parts]
    assert ["-m", "tests.simulation", "--for", "10m"] in commands
    for steps in (run.steps_of(True, ["-x"]), run.steps_of(False, [])):
        assert not any("tests.simulation" in p.command for parts in steps for p in parts)


def test_other_pythons_run_the_part_without_clusters_and_the_demo() -> None:
    steps = run.steps_of_pythons([".venv310", ".venv312"])
    assert [[p.name for p in parts] for parts in steps] == [
        [f"{venv} {name}" for name in names]
        for venv in ("venv310", "venv312")
        for names in ([*run.WITHOUT_CLUSTERS, *run.AROUND], ["demo"])
    ]
    assert all(p.command[0].startswith(f".{p.name.split()[0]}/bin/") for parts in steps for p in parts)


def test_a_cell_of_the_matrix_that_cannot_be_installed_fails_unless_it_may_be_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_environment(*_: object) -> None:
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)

    monkeypatch.setattr(matrix, "make_environment", make_environment)
    monkeypatch.setattr(matrix, "interpreter", lambda _: sys.executable)
    for options, status, said in (([], 1, "| not installed:"), (["--if-installable"], 0, "| skipped, since")):
        assert matrix.main(["--cells", "spark-4.3", *options]) == status
        row = capsys.readouterr().out.splitlines()[-1]
        assert said in row and "ended with status 3" in row


@pytest.mark.parametrize("status", [0, 1, 5])
def test_a_cell_of_the_matrix_is_right_if_tests_ran_and_passed(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(matrix, "make_environment", lambda *_: None)
    monkeypatch.setattr(matrix, "interpreter", lambda _: sys.executable)
    monkeypatch.setattr(matrix, "versions_in", lambda _: "")
    monkeypatch.setattr(matrix, "run_part", lambda part, *_: Outcome(part, status, 1.0, "1 passed"))
    assert matrix.main(["--cells", "spark-4.3"]) == (0 if status == 0 else 1)


@pytest.mark.parametrize("status", [0, 1])
def test_a_cell_with_checks_runs_them_from_the_source_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int
) -> None:
    program = tmp_path / "project-1" / "tests" / "installed.py"
    program.parent.mkdir(parents=True)
    program.write_text(f"import os, sys\nprint('=', sys.argv[1:], os.environ['PYTHONPATH'])\nsys.exit({status})")
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "project-1", "project-1")
    python = tmp_path / "install-client" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(matrix, "VENVS", tmp_path)
    monkeypatch.setattr(matrix, "distributions", lambda: (tmp_path / "sdist.tar.gz", tmp_path / "none.whl"))
    monkeypatch.setattr(matrix, "make_environment", lambda *_: None)
    monkeypatch.setattr(matrix, "interpreter", lambda _: sys.executable)
    monkeypatch.setattr(matrix, "versions_in", lambda _: "")
    assert matrix.main(["--cells", "install-client"]) == status
    assert "| ['package', 'client'] |" in capsys.readouterr().out.splitlines()[-1]


def test_each_check_of_an_install_is_in_a_cell() -> None:
    checks = {check for cell in matrix.CELLS.values() for check in cell.checks}
    assert checks == installed.CHECKS.keys()
