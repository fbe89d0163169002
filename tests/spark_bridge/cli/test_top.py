"""``statestore top`` and the pace of queries that it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from spark_bridge.cli.main import app
from spark_bridge.cli.overview import top_view
from spark_bridge.overview.model import INPUT_WAIT, Checkpoint, Overview, Partition, pace_of
from tests.command_line import CliRunner
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.spark_bridge.cli.overviews import OVERVIEW, QUERY, printed


def checkpoints(*moments: int, rows: int | None = 500) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(i, i, 1, "r", completed_ms=ms, duration_ms=100 * i, rows=rows, delta_bytes=1024)
        for i, ms in enumerate(moments, 1)
    )


def overview(*moments: int, rows: int | None = 500) -> Overview:
    return replace(OVERVIEW, taken_ms=12_000, queries=(replace(QUERY, checkpoints=checkpoints(*moments, rows=rows)),))


def test_pace() -> None:
    (pace,) = pace_of(overview(5_000, 7_000, 10_000))
    assert (pace.freshness_ms, pace.usual_ms, pace.interval_ms) == (2_000, 200, 2_500)
    assert pace.rows_per_second == 2 * 500 / 5, "the rows of the first checkpoint came before"
    assert (pace.bytes_per_checkpoint, pace.hottest) == (1024, "aircraft/0")
    assert pace.hottest_ms == sum(QUERY.operators[0].partitions[0].commit_ms.values())


def test_a_partition_that_waits_for_its_rows_is_not_the_hottest() -> None:
    """As the page's heat map and the fault slow-partition have it: the source is slow then, and not the partition."""
    waits = Partition("aircraft", 0, commit_ms={INPUT_WAIT: 20_000.0, "get_ms": 5.0})
    works = Partition("aircraft", 1, commit_ms={INPUT_WAIT: 10.0, "get_ms": 900.0, "changelog_ms": 30.0})
    operator = replace(QUERY.operators[0], partitions=(waits, works))
    (pace,) = pace_of(replace(OVERVIEW, queries=(replace(QUERY, operators=(operator,)),)))
    assert (pace.hottest, pace.hottest_ms) == ("aircraft/1", 930.0)


def test_unknown_figures_are_none() -> None:
    assert pace_of(overview(5_000))[0].rows_per_second is None
    assert pace_of(overview(5_000, 7_000, rows=None))[0].rows_per_second is None
    assert pace_of(overview())[0].freshness_ms is None
    assert pace_of(overview())[0].watermark_behind_ms is None


def test_prepared_version_counts_if_no_completed_one_is_known() -> None:
    """So it is where a checkpoint without a history is read."""
    found = overview(5_000, 7_000)
    prepared = Checkpoint(3, 3, 1, "r", "prepared", prepared_ms=11_000)
    alone = replace(found, queries=(replace(found.queries[0], checkpoints=(prepared,), watermark_ms=9_000),))
    (pace,) = pace_of(alone)
    assert (pace.freshness_ms, pace.watermark_behind_ms) == (1_000, 3_000)
    both = replace(found, queries=(replace(found.queries[0], checkpoints=(*checkpoints(5_000), prepared)),))
    assert pace_of(both)[0].freshness_ms == 7_000


def test_top_view_prints_one_overview() -> None:
    text = printed(top_view(overview(5_000, 7_000, 10_000)))
    for part in ("flights", "200", "2.0 s", "aircraft/0", "host-a-0", "ERROR host-silent"):
        assert part in text


def test_a_pipe_is_looked_into_once(stream: Callable[..., Stream]) -> None:
    s = stream(batches=3)
    at = str(s.world.root / "ck")
    result = CliRunner().invoke(app, ["top", "--checkpoint", at, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["queries"][0]["version"] == 3
    assert "Nothing is wrong" in CliRunner().invoke(app, ["top", "--checkpoint", at]).stdout
    s.world.plan_spark(5)
    s.world.commit_spark(5)
    assert CliRunner().invoke(app, ["top", "--checkpoint", at]).exit_code == 1
