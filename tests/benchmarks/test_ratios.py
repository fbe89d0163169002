"""Ratios, targets, and what counts as slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kafka_latency import Turn
from suite.model import Case, Part, Spread, Target, judge, ratio, repeated, slower

from tests.benchmarks.measurements import case, failed, part, result


def test_a_ratio_is_taken_turn_by_turn() -> None:
    assert ratio(case([1.0, 2.0, 1.0], [4.0, 6.0, 5.0]), "ours", "native") == Spread(4.0, 3.0, 5.0)


def test_of_rates_more_is_faster() -> None:
    assert ratio(case([10.0], [5.0], more_is_better=True), "ours", "native").median == 2.0


def test_a_ratio_target_counts_by_the_median() -> None:
    target = Target("t", "longs", "ours", 3, against="native", at_least=True)
    assert judge(target, [part(case([1, 1, 1], [2.9, 3.0, 9.0]))]).reached is True
    assert judge(target, [part(case([1, 1, 1], [2.0, 2.9, 9.0]))]).reached is False


def test_a_difference_is_taken_turn_by_turn() -> None:
    target = Target("t", "longs", "ours", 60, kind="difference", against="native", unit="ms")
    judged = judge(target, [part(case([110, 170], [100, 90]))])
    assert judged.found == Spread(45.0, 10, 80) and judged.reached


def test_growth_is_from_case_to_case() -> None:
    target = Target("t", "late", "ours", 1.3, kind="growth", since="early")
    judged = judge(target, [part(case([1, 2, 3], [9, 9, 9], "early"), case([2, 3], [9, 9], "late"))])
    assert judged.found == Spread(1.25, 1.0, 1.5) and judged.reached


def test_a_value_is_that_of_the_contestant() -> None:
    judged = judge(Target("t", "longs", "ours", 1, kind="value"), [part(case([0.5, 1.5, 1.25], [1, 1, 1]))])
    assert judged.found == Spread(1.25, 0.5, 1.5) and judged.reached is False


@pytest.mark.parametrize(
    "target",
    [
        Target("no such case", "other", "ours", 1, against="native"),
        Target("no such contestant", "longs", "theirs", 1, against="native"),
        Target("nobody to compare with", "longs", "ours", 1, against="theirs"),
        Target("no earlier case", "longs", "ours", 1, kind="growth", since="other"),
    ],
)
def test_missing_measurements_are_not_judged(target: Target) -> None:
    assert judge(target, [part(case([1], [1]))]).reached is None
    assert judge(target, []).found is None
    assert judge(target, [failed("it broke")]).found is None


# -- kept runs -----------------------------------------------------------------------------------


def on(day: int, *cases: Case, processor: str = "a processor") -> Part:
    machine = {"cores": f"2, {processor}", "memory": "24 GiB", "load": "0.4"}
    return replace(part(*cases), day=f"2026-01-{day:02}", machine=machine)


def test_a_target_counts_by_the_worst_run_on_any_machine() -> None:
    target = Target("t", "longs", "ours", 3, against="native", at_least=True)
    kept = result(on(1, case([1], [4]))).with_part(on(2, case([1, 1], [2, 2.5]), processor="another"))
    kept = kept.with_part(on(3, case([1], [5])))
    judged = judge(target, kept.runs("venv"))
    assert (judged.found, judged.reached, judged.runs) == (Spread(2.25, 2, 5), False, 3)
    most = Target("t", "longs", "ours", 3, kind="value")
    assert judge(most, [on(1, case([1], [1])), on(2, case([4], [1]))]).found == Spread(4, 1, 4)


def test_of_each_machine_and_size_the_newest_runs_are_kept() -> None:
    kept = result(on(1, case([1], [1])))
    for day in range(2, 9):
        kept = kept.with_part(on(day, case([1], [day])))
    kept = kept.with_part(on(9, case([1], [9]), processor="another"))
    kept = kept.with_part(replace(on(10, case([1], [10])), size={"keys": 7}))
    assert [run.day[-2:] for run in kept.runs("venv")] == ["10"], "other sizes are other work"
    kept = kept.with_part(failed("it broke")).with_part(on(11, case([1], [11])))
    assert [run.day[-2:] for run in kept.runs("venv")] == ["11", "09", "08", "07", "06", "05"]


def test_a_repeated_ratio_is_within_the_range_or_outside() -> None:
    kept = (
        result(on(1, case([1, 1], [3, 4])))
        .with_part(on(2, case([1], [5])))
        .with_part(on(3, case([1], [100]), processor="another"))
    )
    assert repeated(kept, on(4, case([1], [4.5]))) == [
        "longs: ours 4.5 times as fast as native, within the range of 2 kept runs (3 to 5)"
    ]
    assert "outside the range of 2 kept runs (3 to 5)" in repeated(kept, on(4, case([1], [2.9])))[0]
    assert repeated(kept, on(4, case([1], [2.9]), processor="a third one")) == []


# -- what has become slower ----------------------------------------------------------------------


def found(kept: list[float], now: list[float]) -> list[float]:
    """How many times slower it is said to be, if native takes 12 and ours so many times less."""
    before, after = (result(part(case([12 / r for r in ratios], [12.0] * len(ratios)))) for ratios in (kept, now))
    return [s.times for s in slower(before, after)]


def test_half_as_fast_is_slower() -> None:
    assert found([3.8, 4.0, 4.4], [1.9, 2.0, 2.1]) == pytest.approx([2.0])


def test_less_than_the_limit_is_not() -> None:
    assert found([3.8, 4.0, 4.4], [2.7, 2.8, 2.9]) == []
    assert found([3.8, 4.0, 4.4], [2.6, 2.6, 2.6]) == pytest.approx([4.0 / 2.6])


def test_faster_is_not() -> None:
    assert found([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]) == []


def test_a_difference_within_the_kept_spread_is_noise() -> None:
    assert found([1.9, 4.0, 6.0], [1.8, 2.0, 2.1]) == [], "kept turns were as slow"


def test_one_turn_as_fast_as_usual_clears_it() -> None:
    assert found([3.8, 4.0, 4.4], [1.9, 2.0, 4.1]) == [], "the machine was busy in the other turns"


def test_only_the_same_cases_are_compared() -> None:
    kept = result(part(case([1, 1], [4, 4], "other")), failed("then", "venv42"))
    now = result(part(case([4, 4], [4, 4])), part(case([4, 4], [4, 4]), environment="venv42"))
    assert slower(kept, now) == []
    broken = result(replace(part(case([4, 4], [4, 4], "other")), failure="now"))
    assert slower(kept, broken) == []


def test_other_sizes_are_not_compared() -> None:
    kept, now = part(case([1, 1], [4, 4])), part(case([4, 4], [4, 4]))
    assert len(slower(result(kept), result(now))) == 1
    assert slower(result(kept), result(replace(now, size={"keys": 5}))) == []


def test_only_what_two_runs_find_is_slower() -> None:
    kept = result(part(case([1, 1], [4, 4], "a"), case([1, 1], [4, 4], "b"), case([1, 1], [4, 4], "c")))
    first = result(part(case([4, 4], [4, 4], "a"), case([4, 4], [4, 4], "b"), case([1, 1], [4, 4], "c")))
    second = result(part(case([1, 1], [4, 4], "a"), case([3, 3], [4, 4], "b"), case([4, 4], [4, 4], "c")))
    (found,) = [ratio for ratio in slower(kept, second) if ratio in slower(kept, first)]
    assert found.case == "b" and found.times == pytest.approx(3.0)


# -- rates that a turn over Kafka sustains


def growing(first: float, last: float, probes: int = 1000) -> list[float]:
    return [first + (last - first) * i / (probes - 1) for i in range(probes)]


@pytest.mark.parametrize(
    ("turn", "is_sustained"),
    [
        (Turn(growing(1200.0, 1200.0)), True),
        (Turn(growing(800.0, 1800.0)), True),
        (Turn(growing(1200.0, 12_000.0)), False),
        (Turn([*growing(2000.0, 11_000.0, 333), *growing(11_000.0, 13_000.0, 667)]), False),
        (Turn(growing(1200.0, 1200.0), load_behind=0.6), False),
    ],
)
def test_a_rate_is_sustained_if_latency_does_not_grow(turn: Turn, is_sustained: bool) -> None:
    assert turn.is_sustained is is_sustained
