"""Arguments of the command line, and completeness of the comparisons."""

from __future__ import annotations

import bench
import pytest
from comparisons import COMPARISONS
from suite.model import ENVIRONMENTS, VENV, VENV42, VENV43, Comparison

from tests.benchmarks.measurements import comparison


def test_sizes_are_taken_with_the_comparison() -> None:
    options, sizes = bench.parse(
        ["throughput", "--keys", "100000", "--warm-up=2", "--contestants", "a", "b", "--smoke"]
    )
    assert options.names == ["throughput"] and options.smoke
    assert sizes == {"keys": ["100000"], "warm_up": ["2"], "contestants": ["a", "b"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keys", "5"], "sizes are given with the one comparison"),
        (["growth", "latency", "--keys", "5"], "sizes are given with the one comparison"),
        (["grwth"], "Unknown comparison grwth; the comparisons are throughput, "),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_size_is_read_like_the_usual_one() -> None:
    size = comparison().size("full", {"keys": ["2_000"], "work": ["c", "d"]})
    assert size == {"keys": 2000, "work": ["c", "d"]}
    assert comparison().size("smoke", {"work": ["c"]}) == {"keys": 100, "work": ["c"]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kees": ["1"]}, "totals has no size 'kees'; it has keys, work."),
        ({"keys": ["many"]}, "--keys takes a value like int, not 'many'."),
        ({"keys": ["1", "2"]}, "--keys takes one value, not '1 2'."),
        ({"keys": []}, "--keys needs a value."),
    ],
)
def test_a_wrong_size_is_refused(given: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ValueError, match="^" + words.replace(".", r"\.")):
        comparison().size("full", given)


@pytest.mark.parametrize("one", COMPARISONS.values(), ids=COMPARISONS.keys())
def test_comparisons_are_whole(one: Comparison) -> None:
    assert set(one.sizes) == set(one.minutes) == {"smoke", "full"}
    assert set(one.sizes["smoke"]) == set(one.sizes["full"]), "each size can be given in both"
    assert set(one.environments) <= set(ENVIRONMENTS)
    assert all(target.environment in one.environments for target in one.targets)


def test_a_smoke_run_takes_the_first_environment() -> None:
    throughput = COMPARISONS["throughput"]
    assert throughput.runs_in("full", None) == [VENV, VENV42, VENV43]
    assert throughput.runs_in("smoke", None) == [VENV]
    assert throughput.runs_in("smoke", VENV42) == throughput.runs_in("full", VENV42) == [VENV42]
    assert COMPARISONS["provider"].runs_in("full", VENV42) == []


def test_the_targets_of_the_project_are_judged() -> None:
    limits = {(c.name, t.limit) for c in COMPARISONS.values() for t in c.targets}
    assert {
        ("throughput", 2.5),
        ("throughput", 15),
        ("throughput", 25),
        ("throughput", 40),
        ("latency", 50),
        ("growth", 1.3),
        ("host-kill", 2.5),
        ("restart", 1),
        ("savepoint", 20),
        ("nexmark", 1.4),
        ("queries", 0.8),
        ("provider", 0.9),
    } <= limits
