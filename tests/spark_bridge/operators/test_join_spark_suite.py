"""Cases of Spark's StreamingJoinSuite, with its rows and its batches, those without data included.

Times are in seconds, as there. ``waiting`` is what the suite calls the total of state rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator_actor.messages import BatchTimes
from tests.spark_bridge.operators.join_model import Case, JoinRun, Row

Answer = tuple[Any, ...]


class Suite:
    """A join whose batches come as in Spark: a batch that raises the watermark is followed by one without data.

    The watermark is the least of both sides; None as a delay is a side without one.
    """

    def __init__(
        self, case: Case, left_delay: int | None = 0, right_delay: int | None = 0, *, without_data: bool = True
    ) -> None:
        self.without_data = without_data
        self.run = JoinRun(case)
        self.delays = (left_delay, right_delay)
        self.seen = [0, 0]
        self.late = self.now = 0
        self.dropped = 0
        self.names: dict[str, Any] = {}

    def add(self, left: Sequence[tuple[Any, int]] = (), right: Sequence[tuple[Any, int]] = ()) -> list[Answer]:
        """Process new rows (key, time) and return the output as (key, left time, right time)."""
        self.names.update({str(k): k for k, _ in (*left, *right)})
        rows = [(str(k), t, 1) for k, t in left], [(str(k), t, "1") for k, t in right]
        answers = self._batch(*rows)
        self.dropped = self.run.run.figures.num_rows_dropped_by_watermark
        for side, given in enumerate((left, right)):
            self.seen[side] = max([self.seen[side], *(t for _, t in given)])
        mark = min(max(0, s - d) for s, d in zip(self.seen, self.delays, strict=True) if d is not None)
        self.late, before, self.now = self.now, self.now, max(self.now, mark)
        if self.now > before and self.without_data:
            answers += self._batch([], [])
            self.late = self.now
        return sorted(answers, key=repr)

    def _batch(self, left: list[Row], right: list[Row]) -> list[Answer]:
        times = BatchTimes(0, self.now * 1000, self.late * 1000)
        pairs = self.run.batch(left, right, times)
        return [(self.names[(le or ri)[0]], le and le[1], ri and ri[1]) for le, ri in pairs]

    @property
    def waiting(self) -> int:
        """How many rows of both sides are stored."""
        return sum(self.run.num_waiting())


def test_inner_join_without_a_watermark_keeps_all_rows() -> None:
    """As "stream stream inner join on non-time column"."""
    suite = Suite(Case("inner", timed=False), None, 0)
    assert suite.add(left=[(1, 1)]) == []
    assert suite.add(right=[(1, 2), (10, 2)]) == [(1, 1, 2)]
    assert suite.add(left=[(10, 3)]) == [(10, 3, 2)]
    assert suite.add(right=[(1, 4)]) == [(1, 1, 4)]
    suite.run.run.restart()
    assert suite.add(left=[(1, 5)]) == [(1, 5, 2), (1, 5, 4)]
    suite.run.run.restart()
    assert suite.add(left=[(100, 6)], right=[(100, 6)]) == [(100, 6, 6)]
    assert suite.waiting == 8


def test_inner_join_with_a_condition_on_one_side() -> None:
    """As "stream stream inner join with time range - with watermark - one side condition"."""
    suite = Suite(Case("inner", 5.000001, None), 10, 10)
    assert suite.add(left=[(1, 5)]) == []
    assert suite.add(right=[(1, 11)]) == [(1, 5, 11)]
    assert suite.add(right=[(1, 10)]) == []
    assert suite.waiting == 3
    assert suite.add(left=[(1, 3), (1, 30)]) == [(1, 3, 10), (1, 3, 11)]
    assert suite.waiting == 5
    assert suite.add(right=[(0, 30)]) == []
    assert suite.waiting == 4
    assert suite.add(right=[(1, 20), (1, 21), (1, 28)]) == [(1, 3, 21), (1, 3, 28), (1, 5, 21), (1, 5, 28)]
    assert (suite.waiting, suite.dropped) == (5, 1)
    assert suite.add(left=[(1, 20), (1, 21)]) == [(1, 21, 28)]
    assert (suite.waiting, suite.dropped) == (6, 1)


def test_inner_join_with_conditions_on_both_sides() -> None:
    """As "stream stream inner join with time range - with watermark - two side conditions"."""
    suite = Suite(Case("inner", -5, 10), 20, 30)
    assert suite.add(left=[(1, 20)]) == []
    found = suite.add(right=[(1, t) for t in (14, 15, 25, 26, 30, 31)])
    assert found == [(1, 20, 15), (1, 20, 25), (1, 20, 26), (1, 20, 30)]
    assert suite.waiting == 7
    assert suite.add(right=[(1, 60)]) == []
    assert suite.add(left=[(1, t) for t in (49, 50, 65, 66)]) == [(1, 50, 60), (1, 65, 60)]
    assert suite.waiting == 10
    assert suite.add(left=[(1, 30), (1, 31)]) == [(1, 31, 26), (1, 31, 30), (1, 31, 31)]
    assert (suite.waiting, suite.dropped) == (11, 1)
    assert suite.add(right=[(1, 80)]) == []
    assert suite.waiting == 6
    assert suite.add(right=[(1, 46), (1, 50)]) == [(1, 49, 50), (1, 50, 50)]
    assert (suite.waiting, suite.dropped) == (7, 1)


def outer(how: str) -> Suite:
    """The join of the suite's outer joins on a key with the time: rows match at one time only."""
    return Suite(Case(how, in_key=True), 10, 10)


def test_left_outer_join_on_a_key_with_the_time() -> None:
    """As "windowed left outer join", with the time itself in the place of its window."""
    suite = outer("left")
    both = [("1", 10), ("2", 10)]
    assert suite.add(left=[*both, ("3", 10)], right=[*both, ("5", 10)]) == [("1", 10, 10), ("2", 10, 10)]
    assert suite.waiting == 6
    # The watermark goes to 11: all rows leave, those of the left side without a match with nulls.
    assert suite.add(left=[("9", 21)], right=[("9", 21)]) == [("3", 10, None), ("9", 21, 21)]
    assert suite.waiting == 2


def test_right_and_full_outer_join_on_a_key_with_the_time() -> None:
    """As "windowed right outer join" and "windowed full outer join"."""
    answers = {}
    for how in ("right", "full"):
        suite = outer(how)
        suite.add(left=[("1", 10), ("3", 10)], right=[("1", 10), ("5", 10)])
        answers[how] = suite.add(left=[("9", 21)], right=[("9", 21)])
    right = [("5", 10, 10), ("9", 21, 21)]
    assert [(k, t) for k, _, t in answers["right"]] == [(k, t) for k, _, t in right]
    assert {k for k, *_ in answers["full"]} == {"3", "5", "9"}


def test_a_row_that_has_matched_gives_no_nulls_when_it_leaves() -> None:
    """As "SPARK-26187 self left outer join should not return outer nulls for already matched rows"."""
    suite = Suite(Case("left", 0, 5), 0, 0)
    assert suite.add(left=[(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)], right=[(k, k) for k in (1, 2, 3, 4, 5)]) == [
        (k, k, k) for k in (1, 2, 3, 4, 5)
    ]
    assert suite.add(left=[(9, 20)], right=[(9, 20)]) == [(9, 20, 20)]
    assert suite.waiting == 2


def test_only_rows_without_a_match_give_nulls() -> None:
    """As "SPARK-35896"-like: of two rows of one key and time, one leaves with a match and one without."""
    suite = Suite(Case("full", 0, 5), 0, 0)
    assert suite.add(left=[("a", 10)]) == []
    assert suite.add(right=[("a", 14), ("b", 14)]) == [("a", 10, 14)]
    found = suite.add(left=[("c", 40)], right=[("c", 41)])
    assert found == [("b", None, 14), ("c", 40, 41)]
    assert suite.waiting == 2


def test_left_semi_join_gives_each_row_once() -> None:
    """As "left semi join with watermark range condition"."""
    suite = Suite(Case("left_semi", -5, 10), 10, 20)
    assert suite.add(left=[(1, 5), (3, 5)], right=[(1, 10), (2, 5)]) == [(1, 5, None)]
    # A second match gives nothing: the row has left.
    assert suite.add(right=[(1, 12)]) == []
    assert suite.add(left=[(1, 21)]) == [], "no right row from 16 on"
    assert suite.add(right=[(1, 22)]) == [(1, 21, None)]
    assert suite.add(left=[(1, 22)]) == [(1, 22, None)]
    assert suite.add(left=[(1, 22)], right=[(1, 23)]) == [(1, 22, None)]


def test_rows_are_matched_before_any_leaves() -> None:
    """As "SPARK-49829": rows of the batch that moves the watermark behind them still match each other."""
    suite = Suite(Case("left", 0, 5), 0, 0)
    suite.add(left=[("x", 10)], right=[("x", 10)])
    # Late is up to 10; both rows of "a" are due when this batch ends, and match.
    assert suite.add(left=[("a", 12), ("z", 100)], right=[("a", 13), ("z", 100)]) == [("a", 12, 13), ("z", 100, 100)]


def test_a_batch_without_data_makes_rows_late_that_otherwise_still_match() -> None:
    """Spark runs one where a watermark has risen. Our inner and semi joins run none: see docs, differences."""
    answers = []
    for without_data in (True, False):
        suite = Suite(Case("left_semi", -10, 30), 20, 20, without_data=without_data)
        suite.add(left=[("z", 59)], right=[("z", 59)])
        answers.append(suite.add(left=[("k", 9)], right=[("k", 12)]))
        assert suite.dropped == (2 if without_data else 0)
    assert answers == [[], [("k", 9, None)]]
