"""Rolling aggregates against a model: random streams, late rows, restarts, and answers as of random moments."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from backends.conf import HOUR, MINUTE, SECOND
from backends.encoding.operator_schema import ROLLING_KIND, OperatorSchema, evolved, horizons_since
from coordinator_actor.messages import BatchTimes
from spark_bridge.aggregates.computation import Output
from spark_bridge.aggregates.rolling import Rolling, declared_rolling, horizon_of
from spark_bridge.exceptions import StateTimeError
from spark_bridge.operators import rolling_task
from spark_bridge.state_format.layouts import DUE_FAMILY, LOST_FAMILY, TILES_FAMILY
from spark_bridge.state_format.stored_rows import VariableRows
from tests.effort import effort
from tests.spark_bridge.operators.operator_runs import TS, OperatorRun, Watermark, batch_of
from tests.spark_bridge.operators.rolling_model import (
    EVERY_FUNCTION,
    HORIZONS,
    ROWS,
    EveryRow,
    differences,
    every_batch,
    every_result,
    every_row,
    model,
    random_rows,
    rolling_operator,
)


@pytest.mark.in_turns("FileStateStoreProvider", "RocksDBStateStoreProvider")
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
    ((_, lost),) = run.stored_rows(LOST_FAMILY)
    assert lost["__lost"].timestamp() == 1039
    run.close()


@pytest.mark.parametrize("seed", effort((0, 3, 5), range(8)))
def test_no_moment_has_a_number_without_the_rows_that_are_gone(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As of any moment, also one before the watermark, an answer counts every row that ever came, or is an error.

    The error comes only if a key of the partition has expired, or lost a late row, that a horizon reaches back to.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(rolling_task, "FEW_ROWS", (rolling_task.FEW_ROWS, 5)[seed % 2])
    horizons = ("30 seconds", "10 minutes", "1 hour")[: 2 + seed % 2]
    logic, rolling = rolling_operator(horizons, exact=seed % 4 == 3)
    run = OperatorRun(logic, logic.schema, ["k"], 1, (FileStateStoreProvider, RocksDBStateStoreProvider)[seed // 4])
    watermark = Watermark(rng.choice((0, 60)))
    came: dict[str, list[tuple[int, float]]] = {}
    alive: dict[str, list[int]] = {}
    clock, lost = 1_000_000, -(10**18)
    answered = refused = 0
    for step in range(40):
        clock += rng.choice((1, 20, 300, 3000 if step % 5 == 4 else 60))
        new = random_rows(rng, clock, rng.choice((2, 20)), rng.choice((2, 200)))
        times = watermark.times()
        bound = rolling.expired(times.watermark_ms * 1000)
        for key, at, value in new:
            us = int(at * SECOND)
            came.setdefault(key, []).append((us, value))
            if us > bound:
                alive.setdefault(key, []).append(us)
            else:
                lost = max(lost, us)
        for key in [key for key, of_key in alive.items() if max(of_key) <= bound]:
            lost = max(lost, *alive.pop(key))
        run.batch(batch_of(ROWS, new), times)
        watermark.advance([int(at) for _, at, _ in new])
        first = max(-(-lost // max(h.hop, 1)) * max(h.hop, 1) + h.us for h in rolling.horizons)
        near = [first + us for us in (-1, 0, -SECOND, MINUTE)] if lost > 0 else []
        for moment in [*near, *(clock * SECOND - rng.randrange(3 * rolling.longest.us) for _ in range(6))]:
            try:
                answers = answers_at(run, moment)
            except StateTimeError as error:
                if "retained rows" in str(error):
                    assert moment < first
                    refused += 1
            else:
                answered += 1
                assert moment >= first
                for key, of_key in came.items():
                    expected = model(rolling, of_key, moment)
                    assert answers.get(key, model(rolling, [], moment)) == expected, (seed, step, key)
        if rng.random() < 0.2:
            run.restart()
    assert answered > 10 and refused > 50
    run.close()


def test_a_longer_horizon_answers_though_older_rows_are_gone() -> None:
    """Rows that expired before a restart made the horizon longer are no error: it is known since when it is complete.

    Rows that are lost after that time are one.
    """
    logic, _ = rolling_operator(("10 minutes",))
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    run.batch(batch_of(ROWS, [("a", 10_000, 1.0)]), BatchTimes(0, 0, 0))
    run.batch(batch_of(ROWS, [("b", 20_000, 1.0)]), BatchTimes(0, 20_000_000, 0))
    assert "a" not in [k["k"] for k in run.stored_keys("default")]
    with pytest.raises(StateTimeError, match="older than the retained rows"):
        answers_at(run, 10_000 * SECOND)
    stored = run.schema.settings["rolling"]
    logic, rolling = rolling_operator(("1 day",))
    since = horizons_since(stored, rolling.to_text(), 20_000 * SECOND)
    rolling = Rolling.of_text(since)
    logic = replace(logic, rolling=rolling, schema=replace(logic.schema, settings={"rolling": since}))
    run.schema = evolved(run.schema, OperatorSchema.from_json(logic.schema.to_json()), ROLLING_KIND)
    run.logic = logic
    run.restart()
    run.batch(batch_of(ROWS, [("b", 20_100, 1.0)]), BatchTimes(0, 20_000_000, 20_000_000))
    assert answers_at(run, 20_100 * SECOND)["b"]["n_1d"] == 2
    run.batch(batch_of(ROWS, [("b", 200_000, 1.0)]), BatchTimes(0, 150_000_000, 20_000_000))
    assert answers_at(run, 200_000 * SECOND)["b"]["n_1d"] == 1
    run.batch(batch_of(ROWS, [("b", 20_200, 1.0)]), BatchTimes(0, 150_000_000, 150_000_000))
    with pytest.raises(StateTimeError, match="older than the retained rows"):
        answers_at(run, 100_000 * SECOND)
    run.close()


def test_a_new_output_is_complete_since_the_watermark_of_its_first_start() -> None:
    """An output that a restart adds lacks earlier rows, also after further restarts. The others stay complete."""

    def setting(**outputs: str) -> str:
        horizons = {name: (horizon_of(horizon),) for name, horizon in outputs.items()}
        return Rolling(tuple(horizons.items())).to_text()

    def since(text: str) -> dict[str, list[int]]:
        return {name: [h.since for h in horizons] for name, horizons in Rolling.of_text(text).outputs}

    second = horizons_since(setting(n="1 hour"), setting(n="1 hour", spent="1 hour"), 7_000 * SECOND)
    assert since(second) == {"n": [0], "spent": [7_000 * SECOND]}
    assert [h.since for h in Rolling.of_text(second).horizons] == [0]
    third = horizons_since(second, setting(n="1 hour", spent="1 hour"), 9_000 * SECOND)
    assert since(third) == {"n": [0], "spent": [7_000 * SECOND]}
    assert since(horizons_since(third, setting(spent="1 day"), 9_000 * SECOND)) == {"spent": [7_000 * SECOND]}


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


@pytest.mark.parametrize("kind", [pa.decimal128(10, 2), pa.decimal128(38, 20), pa.decimal128(38, 38)])
def test_a_sum_of_no_decimals_is_zero(kind: pa.DataType) -> None:
    """For any number of digits: of a horizon without rows, and of one whose rows are all null."""
    logic, _ = rolling_operator(("10 minutes",), outputs=[Output("spent", "sum", "d", None, kind)])
    rows = pa.schema([pa.field("k", pa.string()), pa.field("ts", TS), pa.field("d", kind)])
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    emitted = run.batch(batch_of(rows, [("a", 10_000, Decimal("0.5")), ("b", 10_000, None)]), BatchTimes(0, 0, 0))
    assert {row["k"]: row["spent_10m"] for row in emitted} == {"a": Decimal("0.5"), "b": 0}
    later = answers_at(run, 20_000 * SECOND)
    assert {key: row["spent_10m"] for key, row in later.items()} == {"a": 0, "b": 0}
    run.close()


MILLISECONDS, DAYS = ("5 ms", "40 ms", "1 second"), ("1 hour", "36 hours", "10 days")


@pytest.mark.slow
@pytest.mark.parametrize("seed", effort((0, 5, 7), range(60)))
def test_every_function_equals_the_model_at_random_moments(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random streams with late rows, restarts, and outputs that restarts add and remove; horizons of ms to days.

    A moment that is a multiple of the shortest hop, from the floored watermark on, always has an answer. Others may be
    refused, and never have a wrong answer.
    """
    rng = random.Random(seed)
    horizons = (MILLISECONDS, HORIZONS, DAYS)[seed % 3]
    monkeypatch.setattr(rolling_task, "FEW_ROWS", 0 if seed % 2 else rolling_task.FEW_ROWS)
    first = set(rng.sample(EVERY_FUNCTION, 12)) if seed % 3 else set(EVERY_FUNCTION)
    outputs = [o for o in EVERY_FUNCTION if o in first]
    logic, rolling = rolling_operator(horizons, outputs=outputs, exact=seed % 6 == 5)
    provider = (FileStateStoreProvider, RocksDBStateStoreProvider)[seed // 2 % 2]
    run = OperatorRun(logic, logic.schema, ["k"], 2, provider)
    begun = {o.name: 0 for o in outputs}
    unit = rolling.horizons[0].us
    clock, newest, late_ms, watermark_ms = 10**15, 0, 0, 0
    lag = rng.choice((0, unit // 3, 5 * unit))
    rows: dict[str, list[tuple[int, EveryRow]]] = {}
    for step in range(25):
        clock += rng.choice((1, unit // 7, unit, rolling.longest.us // 5, rolling.longest.us * (step % 9 == 8)))
        bound = rolling.expired(watermark_ms * 1000)
        new = []
        for _ in range(rng.choice((1, 8, 60))):
            late = rng.choice((0, 0, rng.randrange(unit), rng.randrange(rolling.longest.us)))
            new.append(every_row(rng, f"k{rng.randrange(4)}", clock - late - rng.randrange(unit)))
        for row in new:
            if row[1] > bound:
                rows.setdefault(row[0], []).append((step, row))
        rows = {key: of for key, of in rows.items() if max(row[1] for _, row in of) > bound}
        if step == 12:
            kept = [o for o in outputs if rng.random() < 0.7] or outputs[:1]
            added = [o for o in EVERY_FUNCTION if o not in outputs]
            outputs = [*kept, *added]
            begun = {**{o.name: 0 for o in kept}, **{o.name: step for o in added}}
            logic, rolling = rolling_operator(horizons, outputs=outputs, exact=seed % 6 == 5)
            run.schema = evolved(run.schema, OperatorSchema.from_json(logic.schema.to_json()), ROLLING_KIND)
            run.logic = logic
            run.restart()
        emitted = run.batch(every_batch(new), BatchTimes(0, watermark_ms, late_ms), [rng.randrange(len(new))])
        for row in emitted:
            at = round(row["ts"].timestamp() * 10**6)
            assert at == max(r[1] for _, r in rows[row["k"]])
            assert differences(row, expected_results(rolling, rows[row["k"]], at, begun)) == {}, (seed, step)
        floored = rolling.at_watermark(watermark_ms)
        hop = max(1, rolling.horizons[0].hop)
        for _ in range(2):
            ahead = rng.choice((0, rng.randrange(hop * 20), rng.randrange(2 * rolling.longest.us)))
            moment = floored + ahead // hop * hop
            answers = answers_at(run, moment)
            assert set(answers) == set(rows), (seed, step)
            for key, answer in answers.items():
                assert differences(answer, expected_results(rolling, rows[key], moment, begun)) == {}, (seed, step)
        moment = max(floored, clock - rng.randrange(unit))
        try:
            answers = answers_at(run, moment)
        except StateTimeError as error:
            assert "merged in one tile" in str(error)
        else:
            for key, answer in answers.items():
                assert differences(answer, expected_results(rolling, rows[key], moment, begun)) == {}, (seed, step)
        newest = max(newest, *(row[1] for row in new))
        late_ms, watermark_ms = watermark_ms, max(watermark_ms, (newest - lag) // 1000)
        if rng.random() < 0.15:
            run.restart()
    run.close()


def expected_results(
    rolling: Rolling, rows: list[tuple[int, EveryRow]], moment: int, begun: dict[str, int]
) -> dict[str, Any]:
    """The results of a key's rows, each with the step of its batch; an output counts from the step that it began."""
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    results: dict[str, Any] = {}
    for output, horizons in rolling.outputs:
        for h in horizons:
            of = h.us, begun[output]
            if of not in answers:
                start = int(h.start(np.array([moment]))[0])
                answers[of] = every_result([row for step, row in rows if start < row[1] <= moment and step >= of[1]])
            results[f"{output}_{h.name}"] = answers[of][output]
    return results


def answers_at(run: OperatorRun, moment: int) -> dict[str, dict[str, Any]]:
    """What clients read from the state as of a moment."""
    (variable,) = run.schema.variables
    rows = VariableRows(run.schema, variable, moment=moment)
    answers: dict[str, dict[str, Any]] = {}
    for provider in run.providers:
        store = provider.get_read_store(provider.latest_version())
        lost = store.scan(b"", None, LOST_FAMILY) if provider.latest_version() else ()
        rows.require_retained(rows.first_moment(pairs.column(1) for pairs in lost))
        for pairs in store.scan(b"", None, "default") if provider.latest_version() else ():
            tiles = store.get_many(pairs.column(0), TILES_FAMILY)
            decoded = rows.decode_rolling(pairs.column(0), pairs.column(1), tiles).columns
            names = ["k", *rows.value.names]
            answers |= {row.pop("k"): row for row in pa.table(decoded, names=names).to_pylist()}
        store.abort()
    return answers


SETS = (("1 day",), ("10 minutes", "1 day"), ("30 seconds", "1 hour", "1 day"), ("1 minute", "20 minutes", "1 day"))


@pytest.mark.parametrize("seed", effort(range(3), range(8)))
def test_restarts_with_other_horizons_give_the_models_numbers_or_none(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A horizon that starts inside an earlier tile has null, and an error for clients, until it has passed.

    No answer counts a row too many or too few, and in the end all are known.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(rolling_task, "FEW_ROWS", (rolling_task.FEW_ROWS, 0)[seed % 2])
    logic, rolling = rolling_operator(SETS[0])
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    watermark = Watermark(60)
    rows: dict[str, list[tuple[int, float]]] = {}
    clock = 1_000_000
    for step in range(60):
        if step and step % 8 == 0 and step < 50:
            logic, rolling = rolling_operator(rng.choice(SETS), exact=step == 24)
            run.schema = evolved(run.schema, OperatorSchema.from_json(logic.schema.to_json()), "rolling_aggregate")
            run.logic = logic
            run.restart()
        clock += rng.choice((20, 300, 2000)) if step < 50 else 20_000
        new = [(f"k{rng.randrange(3)}", clock - rng.randrange(200), float(rng.randrange(9))) for _ in range(40)]
        times = watermark.times()
        bound = int(rolling.longest.start(rolling.floored(np.array([times.watermark_ms * 1000])))[0])
        for key, at, value in new:
            if at * SECOND > bound:
                rows.setdefault(key, []).append((at * SECOND, value))
        emitted = {r.pop("k"): r for r in run.batch(batch_of(ROWS, new), times)}
        watermark.advance([at for _, at, _ in new])
        for key, row in emitted.items():
            newest = max(t for t, _ in rows[key])
            expected = model(rolling, rows[key], newest)
            del row["ts"]
            is_unknown = {name: row[name] is None and expected[name] is not None for name in row}
            assert {name: row[name] for name in row if not is_unknown[name]} == {
                name: expected[name] for name in row if not is_unknown[name]
            }
            assert step < 58 or not any(is_unknown.values())
            moments = [newest + s * SECOND for s in (0, 100, 3000)]
            for moment in moments:
                try:
                    (answer,) = [a for k, a in answers_at(run, moment).items() if k == key]
                except StateTimeError as error:
                    # Another key may have rows around the moment.
                    assert step < 58 or "is between rows of" in str(error)
                else:
                    assert answer == model(rolling, rows[key], moment)
    run.close()


@pytest.mark.parametrize("few_rows", [0, 1 << 15])
def test_a_finer_horizon_is_unknown_until_the_time_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch, few_rows: int
) -> None:
    """Tiles of two hours cannot tell the last ten minutes: neither the stream nor clients get a wrong number."""
    monkeypatch.setattr(rolling_task, "FEW_ROWS", few_rows)
    logic, _ = rolling_operator(("1 day",))
    run = OperatorRun(logic, logic.schema, ["k"], 1)
    rows = [("a", 10**6 + i * 60, 1.0) for i in range(300)]
    run.batch(batch_of(ROWS, rows), BatchTimes(0, 0, 0))
    logic, rolling = rolling_operator(("10 minutes", "1 day"))
    run.schema = evolved(run.schema, OperatorSchema.from_json(logic.schema.to_json()), ROLLING_KIND)
    run.logic = logic
    run.restart()
    newest = 10**6 + 300 * 60
    (row,) = run.batch(batch_of(ROWS, [("a", newest, 1.0)]), BatchTimes(0, (newest - 60) * 1000, 0))
    assert (row["n_10m"], row["total_10m"], row["n_1d"]) == (None, None, 301)
    with pytest.raises(StateTimeError, match="begins between rows") as raised:
        answers_at(run, newest * SECOND)
    named = str(raised.value).partition("Ask as of ")[2].partition("Z")[0]
    moment = int(np.datetime64(named, "us").astype(np.int64))
    times = [(at * SECOND, value) for _, at, value in [*rows, ("a", newest, 1.0)]]
    assert answers_at(run, moment)["a"] == model(rolling, times, moment)
    run.close()
