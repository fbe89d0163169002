"""Timers, TTL and quiet streams of ``transform_with_state``, end to end on RayDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.patience import HANG
from tests.spark_bridge.conftest import Stream, wait_until
from tests.spark_bridge.streams.processors import (
    INPUT,
    Commands,
    Writer,
    answers,
    at,
    commands_on,
    drain,
    gather,
)

pytestmark = pytest.mark.spark


@pytest.mark.matrix
@pytest.mark.spark42
def test_event_time_timers_fire_by_the_watermark_on_a_quiet_stream_too(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    stream.add(
        [
            *write(
                ("a", 1, "timer.registerTimer", 0),
                ("a", 1, "timer.registerTimer", 90_000),
                ("a", 1, "timer.registerTimer", 90_000),
                ("a", 1, "timer.registerTimer", 90_001),
                ("a", 1, "timer.registerTimer", 80_000),
                ("a", 1, "timer.deleteTimer", 80_000),
                ("a", 1, "timer.deleteTimer", 1),
                ("a", 1, "timer.listTimers"),
                ("b", 2, "timer.registerTimer", 120_000),
                ts=at(100),
            ),
        ]
    )
    stream.add(
        [
            *write(("c", 3, "timer.times"), ts=at(89)),
            *write(("c", 3, "timer.registerTimer", 89_500), ("c", 3, "timer.listTimers"), ts=at(95)),
        ]
    )
    stream.add(
        [
            *write(("c", 3, "v.exists"), ts=at(90)),  # as old as the watermark of the batch before: late
            *write(("c", 3, "l.exists"), ts=at(90.001)),
            *write(("c", 3, "m.exists"), ts=None),
            *write(("d", 4, "v.exists"), ts=at(130)),
        ]
    )
    query, found = gather(commands_on(stream, Commands, "EventTime"), stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    assert [answers(map(tuple, found[n])) for n in range(3)] == [
        [(-1, "expired 0 at 0 True (None, [])"), (7, "timer.listTimers [0, 90000, 90001]")],
        [
            (-1, "expired 89500 at 90000 True (None, [])"),
            (-1, "expired 90000 at 90000 True (None, [(1, 'expired')])"),
            (9, "timer.times (90000, True)"),
            (11, "timer.listTimers [89500]"),
        ],
        [(13, "l.exists True"), (14, "m.exists False"), (15, "v.exists False")],
    ]
    # No more data: the watermark of the last batch with data is that of the next one, which has none.
    wait_until(lambda: any(found[n] for n in list(found) if n > 2))
    assert answers(map(tuple, next(found[n] for n in sorted(found) if n > 2 and found[n]))) == [
        (-1, "expired 120000 at 120000 True (None, [])"),
        (-1, "expired 90001 at 120000 True (None, [(1, 'expired')])"),
    ]
    assert query.exception() is None


def test_processing_time_timers_and_ttl_go_by_the_time_of_the_batch_on_a_quiet_stream_too(
    make_stream: Callable[..., Stream],
) -> None:
    stream, write = make_stream(INPUT), Writer()
    stream.add(
        write(
            ("a", 1, "timer.registerTimer", 1_500),
            ("a", 1, "timer.registerTimer", 10_000_000),
            ("b", 1, "timer.registerTimer", 0),
            *(("a", 1, f"{ttl}_v.update", 1, "x") for ttl in ("brief", "lasting")),
            *(("a", 1, f"{ttl}_l.put", 2, "x") for ttl in ("brief", "lasting")),
            *(("a", 1, f"{ttl}_m.updateValue", 1, "x") for ttl in ("brief", "lasting")),
            ("a", 1, "brief_v.get"),
            ("a", 1, "brief_l.get"),
            ("a", 1, "brief_m.iterator"),
        )
    )
    query, found = gather(commands_on(stream, Commands, "processingTime"), stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    assert answers(map(tuple, found[0])) == [
        (-1, "expired True (None, [])"),
        (9, "brief_v.get ((1, 'x'),)"),
        (10, "brief_l.get [(0, 'x'), (1, 'x')]"),
        (11, "brief_m.iterator [(('x',), (1, 'x'))]"),
    ]
    # Nothing new comes in, and yet the timer fires, once.
    wait_until(lambda: any(found[n] for n in list(found) if n))
    stream.add(
        write(
            *(("a", 1, f"{ttl}_{kind}.exists") for ttl in ("brief", "lasting") for kind in "vlm"),
            ("a", 1, "brief_v.get"),
            ("a", 1, "brief_l.appendValue", 7, "new"),
            ("a", 1, "brief_l.get"),
            ("a", 1, "brief_m.containsKey", None, "x"),
            ("a", 1, "lasting_m.getValue", None, "x"),
            ("a", 1, "timer.listTimers"),
        )
    )
    drain(query, stream.checkpoint, stream.files)
    fired, asked = (answers(map(tuple, found[n])) for n in sorted(found) if n and found[n])
    assert fired == [(-1, "expired True (None, [])")]
    assert [text for _, text in asked] == [
        "brief_v.exists False",
        "brief_l.exists False",
        "brief_m.exists False",
        "lasting_v.exists True",
        "lasting_l.exists True",
        "lasting_m.exists True",
        "brief_v.get (None,)",
        "brief_l.get [(7, 'new')]",
        "brief_m.containsKey False",
        "lasting_m.getValue ((1, 'x'),)",
        "timer.listTimers (1,)",
    ]


@pytest.mark.matrix
@pytest.mark.spark42
def test_available_now_keeps_its_batches_and_ends(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    for _ in range(3):
        stream.add(write(("a", 1, "timer.times"), ts=at(100)))
    found: list[int] = []
    query = (
        commands_on(stream, Commands, "eventTime")
        .writeStream.trigger(availableNow=True)
        .option("checkpointLocation", stream.checkpoint)
        .foreachBatch(lambda batch, _: found.append(batch.count()))
        .start()
    )
    assert query.awaitTermination(HANG)
    assert [n for n in found if n] == [1, 1, 1]
