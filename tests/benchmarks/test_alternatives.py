"""The comparison with other engines: its input, the check of all totals, the course of a contestant, and its table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from alternatives import turns
from alternatives.comparison import ALTERNATIVES, REQUIREMENTS, SPARK, Alternative, Group, _cases, chosen
from alternatives.turns import (
    ContestantError,
    Course,
    Courses,
    Results,
    Running,
    Sizes,
    Used,
    are_counted,
    check,
    in_short,
    moment,
    seconds_between,
    slices_of,
)
from comparisons import COMPARISONS
from suite import report
from suite.model import Contestant, Part, rotated
from suite.runner import Steps

PROGRAMS = Path(turns.PROGRAMS)
GROUP = Group("tests", "counting_program", "tests", "none")


# -- the input -----------------------------------------------------------------------------------


def rows_of(directory: Path, slices: int) -> list[tuple[int, int]]:
    lines = [line for i in range(slices) for line in (directory / turns.name_of(i)).read_text().splitlines()]
    return [(row["user"], row["amount"]) for row in map(json.loads, lines)]


def test_expected_totals_are_those_of_the_rows(tmp_path: Path) -> None:
    made = turns.make(tmp_path / "given", rows=500, keys=40, slices=3)
    for slices in (1, 3):
        totals: turns.Totals = {}
        for user, amount in rows_of(tmp_path / "given", slices):
            n, spent = totals.get(user, (0, 0))
            totals[user] = (n + 1, spent + amount)
        assert made.expected(slices) == totals
    with pytest.raises(ValueError, match="There are 3 slices, not 4"):
        made.expected(4)


def test_the_same_sizes_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        turns.make(tmp_path / name, rows=100, keys=10, slices=2)
    for i in range(2):
        assert (tmp_path / "a" / turns.name_of(i)).read_bytes() == (tmp_path / "b" / turns.name_of(i)).read_bytes()


def test_files_have_the_times_of_their_batches(tmp_path: Path) -> None:
    turns.make(tmp_path / "given", rows=1, keys=2, slices=turns.SLICES + 1)
    times = [(tmp_path / "given" / turns.name_of(i)).stat().st_mtime for i in (0, turns.SLICES - 1, turns.SLICES)]
    assert times[0] == times[1] < times[2]


def test_slices_are_fed_in_order(tmp_path: Path) -> None:
    made = turns.make(tmp_path / "given", rows=5, keys=2, slices=4)
    inbox = tmp_path / "input"
    inbox.mkdir()
    made.feed(inbox, 1, 2)
    assert sorted(path.name for path in inbox.iterdir()) == [turns.name_of(1), turns.name_of(2)]
    names = [turns.name_of(i) for i in range(200)]
    assert sorted(names) == names, "some read files in the order of their names"


# -- the results ---------------------------------------------------------------------------------


def test_the_last_result_of_a_user_counts(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("1,1,10\n1,2,30\n2,1,5\nsomething else\n")
    (tmp_path / "2").write_text("2> +I[3, 1, 7]\n2> -U[3, 1, 7]\n2> +U[3, 2, 9]\n2> -D[1, 9, 9]\n1,1,10\n")
    assert Results(tmp_path).look() == {1: (2, 30), 2: (1, 5), 3: (2, 9)}


def test_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    results = Results(tmp_path)
    (tmp_path / "1").write_text("1,1,1")
    assert results.look() == {}
    (tmp_path / "1").write_text("1,1,10\n")
    assert results.look() == {1: (1, 10)}


def test_waiting_for_results_ends(tmp_path: Path) -> None:
    assert not Results(tmp_path).wait(lambda found: 1 in found, 0.01, lambda: None)
    assert are_counted({1: (3, 0)}, {1: (2, 7)}) and not are_counted({1: (1, 7)}, {1: (2, 7)})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({1: (2, 30), 2: (1, 6)}, "engine has other totals .* of 1 of 2 users: user 2: \\(1, 6\\), not \\(1, 5\\)"),
        ({1: (3, 30), 2: (1, 5)}, "user 1: \\(3, 30\\), not \\(2, 30\\)"),
        ({1: (2, 30)}, "user 2: None, not \\(1, 5\\)"),
        ({1: (2, 30), 2: (1, 5), 9: (1, 1)}, "user 9: \\(1, 1\\), not None"),
    ],
)
def test_a_wrong_total_is_seen(found: turns.Totals, words: str) -> None:
    expected = {1: (2, 30), 2: (1, 5)}
    check("engine", dict(expected), expected)
    with pytest.raises(AssertionError, match=words):
        check("engine", found, expected)


# -- the course ----------------------------------------------------------------------------------


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of these tests is among those of the contestants."""
    monkeypatch.setattr(turns, "GRACE", 0.2)
    monkeypatch.setattr(turns, "PROGRAMS", Path(__file__).parent)
    monkeypatch.setattr(turns, "BENCHMARKS", PROGRAMS)  # on its path: it imports protocol


def alternative(mode: str, restartable: bool = False, is_ours: bool = True) -> Alternative:
    group = Group(f"tests {restartable}", "counting_program", "tests", "none", restartable)
    return Alternative(mode, group, mode, mode, "slowest", is_ours=is_ours)


def courses(tmp_path: Path) -> Courses:
    made = turns.make(tmp_path / "given", rows=2_000, keys=50, slices=2)
    sizes = Sizes(turns=2, events=2, checkpoint_seconds=1.0, share=1.0)
    return Courses(tmp_path, {"tests": Path(sys.executable)}, made, sizes, Steps())


@pytest.mark.parametrize("restartable", [False, True])
def test_a_contestant_is_started_again_from_its_state(tmp_path: Path, programs: None, restartable: bool) -> None:
    (course,) = courses(tmp_path).run([alternative("counting", restartable)])
    assert len(course.per_core) == len(course.per_second) == 2
    assert min(course.per_core + course.per_second) > 0
    assert len(course.to_result) == len(course.to_query) == 2


def test_one_that_takes_all_at_once_is_fed_twice(tmp_path: Path, programs: None) -> None:
    made = turns.make(tmp_path / "given", rows=200, keys=50, slices=4 * turns.SLICES)
    sizes = Sizes(turns=2, events=1, checkpoint_seconds=1.0, share=0.25)
    all_of_them = Courses(tmp_path, {"tests": Path(sys.executable)}, made, sizes, Steps())
    hasty = replace(alternative("hasty"), pace="slow", fed_twice=True)
    (course,) = all_of_them.run([hasty])
    assert len(course.per_core) == 2


def test_an_event_is_asked_for_only_where_there_are_queries(tmp_path: Path, programs: None) -> None:
    (course,) = courses(tmp_path).run([alternative("counting", is_ours=False)])
    assert len(course.to_result) == 2 and course.to_query == []


@pytest.mark.parametrize("mode", ["wrong", "forgetful"])
def test_no_figure_is_given_of_wrong_totals(tmp_path: Path, programs: None, mode: str) -> None:
    with pytest.raises(AssertionError, match=f"{mode} has other totals"):
        courses(tmp_path).run([alternative(mode)])


def test_one_that_fails_is_left_out_with_the_reason(tmp_path: Path, programs: None) -> None:
    all_of_them = courses(tmp_path)
    found = all_of_them.run(
        [
            alternative("broken", True),
            alternative("silent", True),
            alternative("hasty", True),
            alternative("counting", True),
        ]
    )
    assert [course.alternative.name for course in found] == ["counting"]
    assert "ValueError: no such engine" in all_of_them.left_out["broken"]
    assert "all rows were counted before the first look" in all_of_them.left_out["hasty"]
    assert "ended with status 7" in all_of_them.left_out["silent"]


def test_a_program_says_what_it_cannot_do(tmp_path: Path, programs: None) -> None:
    running = Running(Path(sys.executable), "counting_program", tmp_path / "log")
    try:
        running.start("counting", tmp_path, collect=False, checkpoint_seconds=1.0)
        with pytest.raises(ContestantError, match=r"TimeoutError: 0 of 1 after 0\.01 s"):
            running.wait(1, 0.01)
        running.stop()
    finally:
        running.close()
    with pytest.raises(ContestantError, match="ended with status 0"):
        running.stop()


def test_an_error_is_reported_by_its_beginning_and_its_cause() -> None:
    trace = "E1: outer\n\tat x.y(Z.java:1)\nCaused by: a.b.E2Exception: middle\n  at q\nAttributeError: inner\n\n  at r"
    assert in_short(trace) == "E1: outer ... AttributeError: inner"
    assert in_short("E1: alone") == "E1: alone" and in_short("") == "no reason given"


def test_the_time_of_ended_children_counts() -> None:
    work = (
        "import subprocess,sys;subprocess.run([sys.executable,'-c','sum(range(2 * 10**7))']);print();sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        (used,) = moment(process.pid).values()
        assert used.children > 0.02
        assert seconds_between({}, {1: used}) == used.own + used.children
        process.stdin.close()


def test_the_time_between_two_moments() -> None:
    before = {1: Used(0, 10.0, 5.0), 2: Used(1, 3.0, 0.0), 3: Used(2, 40.0, 0.0), 4: Used(1, 7.0, 0.0)}
    same = {1: Used(0, 11.0, 5.0), 2: Used(1, 3.5, 0.0), 3: Used(2, 42.0, 0.0), 4: Used(1, 7.0, 0.0)}
    assert seconds_between(before, same) == pytest.approx(3.5)
    waited_for = {1: Used(0, 10.0, 13.0), 2: Used(1, 3.0, 41.0), 5: Used(2, 6.0, 0.0)}
    assert seconds_between(before, waited_for) == pytest.approx(1.0 + 1.0 + 6.0), (
        "3 and 4 used 1 more before their ends"
    )
    not_waited_for = {1: Used(0, 10.0, 5.0), 2: Used(1, 3.0, 0.0), 4: Used(1, 8.0, 0.0)}
    assert seconds_between(before, not_waited_for) == pytest.approx(1.0)
    with_its_parent = {1: Used(0, 10.0, 50.0), 4: Used(1, 7.0, 0.0)}
    assert seconds_between(before, with_its_parent) == pytest.approx(2.0)


def test_turns_begin_with_another_one() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_a_smaller_share_has_a_warm_up_and_rows_after_it() -> None:
    for share in (0.01, 0.25, 1.0):
        for pace in ("fast", "medium", "slow", "slowest"):
            slices, warm_up = slices_of(pace, share)
            assert 0 < warm_up < slices


# -- who takes part, and the report ---------------------------------------------------------------


def test_other_engines_have_environments_of_pinned_packages() -> None:
    for environment in {a.group.environment for a in ALTERNATIVES.values()} - {*SPARK}:
        lines = (REQUIREMENTS / f"{environment}.txt").read_text().splitlines()
        wrong = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+|#.*", line)]
        assert not wrong
        (package,) = {a.group.package for a in ALTERNATIVES.values() if a.group.environment == environment}
        assert any(line.startswith(f"{package}==") for line in lines)


def test_every_contestant_has_a_program() -> None:
    for one in ALTERNATIVES.values():
        assert (PROGRAMS / f"{one.group.program}.py").exists()


def test_an_unknown_contestant_is_refused() -> None:
    assert [a.name for a in chosen(["bytewax", "aggregate"])] == ["bytewax", "aggregate"]
    with pytest.raises(ValueError, match="Unknown contestant storm; the contestants are aggregate, "):
        chosen(["storm"])


def test_the_table_begins_with_the_fastest() -> None:
    ours, other = ALTERNATIVES["aggregate"], ALTERNATIVES["bytewax"]
    found = [
        Course(ours, [200.0, 300.0], [400.0, 600.0], [30.0, 50.0], [25.0]),
        Course(other, [100.0, 100.0], [150.0, 170.0], [900.0], []),
    ]
    described = {"aggregate": Contestant("aggregate, RayDP", {}, True), "bytewax": Contestant("Bytewax", {})}
    comparison = COMPARISONS["alternatives"]
    part = Part("venv", "full", {}, "2026-01-02", 1.0, {}, {"cores": "2", "memory": "1", "load": "0"}, described)
    part = Part(**{**part.__dict__, "cases": tuple(_cases(found)), "notes": ("`flink` is left out: why",)})
    text = report.render({"alternatives": comparison}, {"alternatives": report.Result("alternatives", {"venv": part})})
    table = text.split("<!-- table of alternatives -->")[1].split("<!-- end of the table of alternatives -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    assert lines[2] == [
        "**aggregate**",
        "aggregate, RayDP",
        "250 (200 to 300)",
        "",
        "500 (400 to 600)",
        "40 (30 to 50)",
        "25 (25 to 25)",
    ]
    assert lines[3] == [
        "bytewax",
        "Bytewax",
        "100 (100 to 100)",
        "2.5 (2 to 3)",
        "160 (150 to 170)",
        "900 (900 to 900)",
        "none",
    ]
    assert "- `flink` is left out: why" in text


def test_the_page_finds_its_place_without_figures_too() -> None:
    text = report.render({"alternatives": COMPARISONS["alternatives"]}, {})
    assert re.search(r"<!-- table of alternatives -->\s+Not measured yet\.\s+<!-- end of the table of", text)


def test_nothing_is_installed_into_the_environment_of_the_project() -> None:
    # Not by `git check-ignore`: the tests also run from a source distribution.
    assert "benchmarks/.environments/" in (PROGRAMS.parents[2] / ".gitignore").read_text().splitlines()
