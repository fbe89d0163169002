"""Rolling aggregates against a model: random streams, late rows, restarts, and answers as of random moments."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from spark_bridge.aggregates.rolling import HOUR, MINUTE, SECOND, declared_rolling
from spark_bridge.operators import rolling_task
from spark_bridge.state_format.layouts import DUE_FAMILY, TILES_FAMILY
from tests.spark_bridge.operators.operator_runs import OperatorRun, Watermark, batch_of
from tests.spark_bridge.operators.rolling_model import HORIZONS, ROWS, model, random_rows, rolling_operator


@pytest.mark.parametrize("provider", [FileStateStoreProvider, RocksDBStateStoreProvider])
@pytest.mark.parametrize("seed", range(6))
def test_batches_emit_what_the_model_has(monkeypatch: pytest.MonkeyPatch, provider: Any, seed: int) -> None:
    """Every touched key, with all horizons as of its newest row; with late rows, expiry, restarts, dense keys."""
    rng = random.Random(seed)
    monkeypatch.setattr(rolling_task, "FEW_ROWS", (rolling_task.FEW_ROWS, 0, 20, 5, 3, 0)[seed])
    horizons = HORIZONS if seed % 2 else ("30 seconds", "10 minutes", "1 hour")
    logic, rolling = rolling_operator(horizons, exact=seed == 3)
    run = OperatorRun(logic, logic.schema, ["k"], 2, provider)
    watermark = Watermark(rng.choice((0, 60, 900)))
    rows: dict[str, list[tuple[int, float]]] = {}
    clock = 1_000_000
    dropped = moved = 0
    for step in range(40):
        clock += rng.choice((1, 20, 300, 3000, 40_000 if step % 9 == 8 else 60))
        new = random_rows(rng, clock, rng.choice((3, 60)), rng.choice((2, 200)))
        times = watermark.times()
        bound = rolling.expired(times.watermark_ms * 1000)
        expected: dict[str, dict[str, Any]] = {}
        for key, at, value in new:
            us = int(at * SECOND)
            if us <= bound:
                dropped += 1
                continue
            rows.setdefault(key, []).append((us, value))
            expected[key] = {}
        for key, rest in list(rows.items()):
            if max(t for t, _ in rest) <= bound:
                del rows[key]
        for key in expected:
            newest = max(t for t, _ in rows[key])
            expected[key] = {"ts": newest, **model(rolling, rows[key], newest)}
        batch = batch_of(ROWS, new)
        emitted = run.batch(batch, times, [rng.randrange(len(new))])
        answers = {r.pop("k"): {**r, "ts": round(r["ts"].timestamp() * SECOND)} for r in emitted}
        assert answers == expected
        watermark.advance([int(at) for _, at, _ in new])
        moved += run.size(TILES_FAMILY)
        if rng.random() < 0.2:
            run.restart()
    assert dropped or seed % 2, "no row was late"
    assert moved, "no key has tiles"
    assert run.figures.num_rows_updated
    run.close()


def test_a_quiet_key_expires_by_the_watermark_alone() -> None:
    """All three families lose the key; no row of another key is read for it."""
    logic, _ = rolling_operator(("10 minutes",))
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    watermark = Watermark(0)
    run.batch(batch_of(ROWS, [("a", 1000 + i, 1.0) for i in range(40)]), watermark.times())
    watermark.advance([1039])
    assert (run.size("default"), run.size(TILES_FAMILY), run.size(DUE_FAMILY)) == (1, 1, 1)
    for clock in (1500, 4000, 5000):
        run.batch(batch_of(ROWS, [("b", clock, 1.0)]), watermark.times())
        watermark.advance([clock])
    assert [k["k"] for k in run.stored_keys("default")] == ["b"]
    assert run.size(TILES_FAMILY) == 0
    assert [k["k"] for k in run.stored_keys(DUE_FAMILY)] == ["b"]
    run.close()


def test_state_of_a_key_does_not_grow_with_its_rows() -> None:
    """A day of a row a second takes as many pieces as three days do."""
    logic, _ = rolling_operator()
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    watermark = Watermark(60)
    sizes = []
    for hour in range(60):
        at = 1_000_000 + hour * 3600
        rows = [("a", at + i * 3, 1.0) for i in range(1200)]
        run.batch(batch_of(ROWS, rows), watermark.times())
        watermark.advance([at + 3597])
        ((_, tiles),) = run.stored_rows(TILES_FAMILY)
        ((_, head),) = run.stored_rows("default")
        sizes.append(len(tiles["tiles"]) + len(head["recent"]))
    assert max(sizes[24:]) < 150
    assert max(sizes[40:]) <= max(sizes[24:40])
    run.close()


@pytest.mark.parametrize(
    ("text", "name", "us"),
    [
        ("10 minutes", "10m", 10 * MINUTE),
        ("24 hours", "24h", 24 * HOUR),
        ("1 hour 30 minutes", "1h30m", 90 * MINUTE),
        ("250 ms", "250ms", 250_000),
        ("2 weeks", "2w", 14 * 24 * HOUR),
    ],
)
def test_horizons_are_named_after_their_duration(text: str, name: str, us: int) -> None:
    """The name ends the names of columns; the hop is at most a tenth."""
    ((_, (horizon,)),) = declared_rolling({"n": [text]}, exact=False).outputs
    assert (horizon.name, horizon.us) == (name, us)
    assert horizon.hop * 10 <= us
