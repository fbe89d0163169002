"""Rows of earlier schemas, read with later ones; which schemas may follow each other; the variables of an operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding import schema as schema_module
from backends.encoding import values as values_module
from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.encoding.schema import MAX_HISTORY, StateSchema, evolution_problem, evolved_schema
from backends.encoding.values import decode_values, encode_values
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument, SchemaMismatchError
from tests.backends.strategies import comparable, kinds, values_of
from tests.effort import examples

KEY = pa.schema([("k", pa.int64())])
NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]
UTC = pa.timestamp("us", tz="UTC")


def schema(**columns: Any) -> pa.Schema:
    return pa.schema([pa.field(n, t) if isinstance(t, pa.DataType) else t.with_name(n) for n, t in columns.items()])


def required(kind: pa.DataType) -> pa.Field:
    return pa.field("", kind, nullable=False)


# -- histories ------------------------------------------------------------------------------------


@st.composite
def wider(draw: Any, kind: pa.DataType, names: Iterator[int]) -> pa.DataType:
    """A type that can be read where the given one was written. ``names`` are not taken by any field so far."""
    if pa.types.is_struct(kind):
        return pa.struct(list(draw(later_schemas(pa.schema(list(kind)), [], names))))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, draw(wider(kind.item_type, names)))
    if pa.types.is_list(kind):
        return pa.list_(draw(wider(kind.value_type, names)))
    if kind in NUMBERS:
        return draw(st.sampled_from(NUMBERS[NUMBERS.index(kind) :]))
    if pa.types.is_decimal(kind):
        return pa.decimal128(draw(st.integers(kind.precision, 38)), kind.scale)
    return draw(st.sampled_from([kind, pa.binary()])) if pa.types.is_string(kind) else kind


@st.composite
def later_schemas(draw: Any, earlier: pa.Schema, removed: list[pa.Field], names: Iterator[int]) -> pa.Schema:
    """Widen, remove and add fields (also again), in another order. ``removed`` are those that are gone now."""
    fields = [f.with_type(draw(wider(f.type, names))) for f in earlier]
    change = draw(st.integers(0, 7))
    if change & 1 and len(fields) > 1:
        removed.append(fields.pop(draw(st.integers(0, len(fields) - 1))))
    if change & 2 and removed:
        again = removed.pop()
        fields.append(again.with_type(draw(wider(again.type, names))))
    if change & 4:
        fields.append(pa.field(f"new{next(names)}", draw(kinds(maps=True))))
    return pa.schema(draw(st.permutations(fields)))


@st.composite
def histories(draw: Any) -> list[pa.Schema]:
    """A schema, and those that it became."""
    columns = draw(st.lists(kinds(maps=True), min_size=1, max_size=2))
    # Types as they are normalised, so that those of rows are.
    made = [StateSchema(KEY, pa.schema([(f"c{i}", kind) for i, kind in enumerate(columns)])).value]
    removed: list[pa.Field] = []
    names = itertools.count()
    for _ in range(draw(st.integers(1, 3))):
        made.append(StateSchema(KEY, draw(later_schemas(made[-1], removed, names))).value)
    return made


def drawable(kind: pa.DataType) -> pa.DataType:
    """The type as it was before decimals got more digits; its values are values of the type as well."""
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(drawable(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, drawable(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(drawable(kind.value_type))
    return pa.decimal128(9, 2) if pa.types.is_decimal(kind) and kind.scale == 2 else kind


def as_python(value: Any, was: pa.DataType, kind: pa.DataType) -> Any:
    """Return what a value of one type becomes in another, without Arrow."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        there = {f.name: f.type for f in was}
        return {f.name: as_python(value[f.name], there[f.name], f.type) if f.name in there else None for f in kind}
    if pa.types.is_map(kind):
        return [(k, as_python(v, was.item_type, kind.item_type)) for k, v in value]
    if pa.types.is_list(kind):
        return [as_python(v, was.value_type, kind.value_type) for v in value]
    if was in NUMBERS and kind in NUMBERS:
        return np.array([value], was.to_pandas_dtype()).astype(kind.to_pandas_dtype())[0].item()
    return value.encode() if pa.types.is_string(was) and pa.types.is_binary(kind) else value


@settings(deadline=None, max_examples=examples(35))
@given(st.data())
def test_rows_of_every_earlier_schema_are_read_as_the_newest(data: Any) -> None:
    schemas = data.draw(histories())
    state = StateSchema(KEY, schemas[0])
    written: list[tuple[Any, Any]] = []
    for step, value in enumerate(schemas):
        if step:
            state = evolved_schema(state, StateSchema(KEY, value))
        assert state.value.equals(value)
        n = data.draw(st.integers(0, 3))
        columns = [
            pa.array(data.draw(st.lists(values_of(drawable(f.type)), min_size=n, max_size=n)), f.type) for f in value
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=value)
        as_struct = (pa.struct(list(value)), pa.struct(list(schemas[-1])))
        expected = [as_python(row, *as_struct) for row in rows.to_pylist()]
        written += zip(state.encode_values(rows).to_pylist(), expected, strict=True)
    nothing = dict.fromkeys(schemas[-1].names)
    mixed = data.draw(st.permutations([*written, (None, nothing)]))
    stored = pa.array([value for value, _ in mixed], pa.binary())
    for state in (state, StateSchema.from_json(state.to_json())):  # noqa: B020 - as it is, and as it is written down
        found = state.decode_values(stored.slice(1))
        found.validate(full=True)
        assert found.schema.types == state.value.types
        assert comparable(found.to_pylist()) == comparable([row for _, row in mixed[1:]])
        again = decode_values(encode_values(found), found.schema)
        assert comparable(again.to_pylist()) == comparable(found.to_pylist())


def test_rows_of_the_newest_schema_alone_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateSchema(KEY, schema(n=pa.int64(), s=pa.string()), (schema(n=pa.int32()),))
    rows = pa.record_batch({"n": [1, None, 3], "s": ["a", "b", None]})
    stored = state.encode_values(rows)
    monkeypatch.setattr(values_module, "_decode_mixed", None)
    assert state.decode_values(stored).to_pylist() == rows.to_pylist()
    gaps = pa.array([stored[0].as_py(), None], pa.binary())
    assert state.decode_values(gaps).to_pylist() == [{"n": 1, "s": "a"}, {"n": None, "s": None}]


def test_an_unknown_schema_number_is_an_error() -> None:
    rows = pa.record_batch({"n": [1]})
    stored = pa.concat_arrays([encode_values(rows, 1), encode_values(rows, 3)])
    state = StateSchema(KEY, schema(n=pa.int64()), (schema(n=pa.int64()), schema(n=pa.int32())))
    with pytest.raises(SchemaMismatchError, match=r"schema number 3.* has the number 2"):
        state.decode_values(stored)
    with pytest.raises(SchemaMismatchError, match="is not of the schema"):
        state.decode_values(pa.array([b"\x02"]))
    with pytest.raises(SchemaMismatchError, match="is not of the schema"):
        state.decode_values(pa.array([encode_values(rows, 1)[0].as_py() + b"x"]))


def test_an_added_field_does_not_change_the_text_of_schemas_without_history() -> None:
    state = StateSchema(KEY, schema(n=pa.int64()))
    assert "history" not in state.to_json()
    later = evolved_schema(state, StateSchema(KEY, schema(n=pa.int64(), more=pa.string())))
    assert later.id != state.id and StateSchema.from_json(later.to_json()) == later
    for wrong in ('"history":[1]', '"history":{}', '"history":[{"type":"struct"}]'):
        with pytest.raises(InvalidStateStoreArgument, match="history"):
            StateSchema.from_json(state.to_json()[:-1] + f",{wrong}}}")


def test_a_damaged_schema_is_refused_as_a_schema() -> None:
    """Readers of files report such an error as damage, and any other one not at all."""
    money = StateSchema(KEY, schema(v=pa.decimal128(38, 10)))
    processor = OperatorSchema((StateVariable("v", "value", {"v": money}),), settings={"time_mode": "none"})
    for text, is_, becomes in (
        (money.to_json(), "decimal(38,10)", "decimal(78,10)"),
        (money.to_json(), "decimal(38,10)", "decimal(38,99999999999)"),
        (processor.to_json(), '{"time_mode":"none"}', '"none"'),
        (processor.to_json(), processor.to_json(), "[" * 100_000),
    ):
        assert is_ in text
        with pytest.raises(InvalidStateStoreArgument):
            OperatorSchema.from_json(text.replace(is_, becomes))


# -- what may follow on what ----------------------------------------------------------------------

BASIC = schema(id=pa.int32(), name=pa.string())
ADDED = schema(id=pa.int32(), name=pa.string(), count=pa.int32(), active=pa.bool_(), score=pa.float64())
UPCAST = schema(id=pa.int64(), name=pa.string())


def chain(*schemas: pa.Schema) -> StateSchema:
    state = StateSchema(KEY, schemas[0])
    for value in schemas[1:]:
        state = evolved_schema(state, StateSchema(KEY, value))
    return state


def test_schemas_that_differ_only_deep_inside_are_not_taken_for_each_other() -> None:
    """A process keeps the normalised columns of the schemas that it has seen."""
    inside = [pa.field("x", pa.int64(), nullable) for nullable in (True, False, True)]
    for nested in (
        [pa.list_(field) for field in inside],
        [pa.struct([field]) for field in inside],
        [pa.map_(pa.string(), field) for field in inside],
        [pa.list_(pa.struct([field])) for field in inside],
    ):
        first, other, again = (
            StateSchema(pa.schema([pa.field("k", pa.string())]), pa.schema([pa.field("v", kind)])).to_json()
            for kind in nested
        )
        assert first == again != other


def test_the_steps_of_sparks_own_tests() -> None:
    reordered = schema(name=pa.string(), id=pa.int32())
    state = chain(BASIC, ADDED, BASIC, reordered, UPCAST)
    assert state.history == (BASIC, ADDED, BASIC, reordered)
    stored = encode_values(pa.record_batch([[0], ["name-0"]], schema=BASIC))
    assert state.decode_values(stored).to_pylist() == [{"id": 0, "name": "name-0"}]
    with pytest.raises(IncompatibleSchemaError, match="STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION") as caught:
        evolved_schema(state, StateSchema(KEY, BASIC))
    assert "Schema evolution is not possible: field 'id' was long, which cannot be read as integer" in str(caught.value)
    assert "Stored: (id long, name string). Program: (id integer, name string)." in str(caught.value)


def test_every_schema_of_the_history_must_be_readable() -> None:
    state = chain(schema(value1=pa.string()), schema(value2=pa.int64()))
    with pytest.raises(IncompatibleSchemaError, match=r"Stored: \(value1 string\). Program: \(value1 integer\)"):
        evolved_schema(state, StateSchema(KEY, schema(value1=pa.int32())))
    assert len(evolved_schema(state, StateSchema(KEY, schema(value1=pa.string()))).history) == 2


def test_the_same_schema_again_adds_nothing() -> None:
    state = chain(BASIC, ADDED)
    assert evolved_schema(state, StateSchema(KEY, ADDED)) == state
    assert evolved_schema(state, StateSchema(KEY, ADDED, (UPCAST,))) == state


@pytest.mark.parametrize(
    ("was", "is_now", "words"),
    [
        (pa.int64(), pa.int32(), "long, which cannot be read as integer"),
        (pa.int16(), pa.int8(), "cannot be read as byte"),
        (pa.float64(), pa.float32(), "cannot be read as float"),
        (pa.float32(), pa.int64(), "cannot be read as long"),
        (pa.string(), pa.int64(), "cannot be read as long"),
        (pa.int64(), pa.string(), "cannot be read as string"),
        (pa.binary(), pa.string(), "cannot be read as string"),
        (pa.bool_(), pa.int32(), "cannot be read as integer"),
        (pa.int32(), pa.date32(), "cannot be read as date"),
        (pa.date32(), pa.timestamp("us"), "cannot be read as timestamp_ntz"),
        (pa.timestamp("us"), UTC, "cannot be read as timestamp"),
        (pa.int64(), pa.decimal128(20, 0), r"cannot be read as decimal\(20,0\)"),
        (pa.decimal128(9, 2), pa.decimal128(9, 3), r"cannot be read as decimal\(9,3\)"),
        (pa.decimal128(9, 2), pa.decimal128(8, 2), r"cannot be read as decimal\(8,2\)"),
        (pa.int64(), pa.struct([("a", pa.int64())]), "cannot be read as"),
        (pa.list_(pa.int64()), pa.int64(), "cannot be read as long"),
        (pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int32())]), "'v.a' was long"),
        (
            pa.struct([("a", pa.int64())]),
            pa.struct([pa.field("b", pa.int64(), nullable=False)]),
            "'v.b' is new and not",
        ),
        (pa.list_(pa.int64()), pa.list_(pa.int32()), "'v.element' was long"),
        (pa.list_(pa.int64()), pa.list_(pa.field("element", pa.int64(), nullable=False)), "'v.element' was nullable"),
        (pa.map_(pa.int32(), pa.int64()), pa.map_(pa.int64(), pa.int64()), "keys of map 'v' were integer and are long"),
        (pa.map_(pa.int32(), pa.int64()), pa.map_(pa.int32(), pa.bool_()), "'v.value' was long"),
        (pa.map_(pa.string(), pa.int64()), pa.list_(pa.int64()), "cannot be read as"),
        (pa.int64(), required(pa.int64()), "'v' was nullable"),
    ],
)
def test_a_schema_change_that_would_lose_or_change_values_is_refused(was: Any, is_now: Any, words: str) -> None:
    with pytest.raises(IncompatibleSchemaError, match=words):
        chain(schema(v=was), schema(v=is_now))


def test_new_fields_must_be_nullable_and_nulls_may_be_allowed_later() -> None:
    with pytest.raises(IncompatibleSchemaError, match="'more' is new and not null"):
        chain(BASIC, pa.schema([*BASIC, pa.field("more", pa.int64(), nullable=False)]))
    nested = pa.list_(pa.field("element", pa.struct([pa.field("a", pa.int64(), nullable=False)]), nullable=False))
    relaxed = schema(v=pa.list_(pa.field("element", pa.struct([("a", pa.int64())]))))
    state = chain(schema(v=required(nested)), relaxed)
    stored = encode_values(pa.record_batch([pa.array([[{"a": 1}]], nested)], names=["v"]))
    assert state.decode_values(stored).to_pylist() == [{"v": [{"a": 1}]}]


def test_the_key_cannot_change_but_in_what_it_allows_to_be_null() -> None:
    value = schema(n=pa.int64())
    for other in (schema(k=pa.int32()), schema(j=pa.int64()), schema(k=pa.int64(), j=pa.int64())):
        with pytest.raises(IncompatibleSchemaError, match=r"STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE.*Stored: \(k long\)"):
            evolved_schema(StateSchema(KEY, value), StateSchema(other, value))
    strict = StateSchema(schema(k=required(pa.int64())), value)
    for stored, declared in ((strict, StateSchema(KEY, value)), (StateSchema(KEY, value), strict)):
        assert evolved_schema(stored, declared) == StateSchema(KEY, value)
    assert evolved_schema(strict, strict) == strict


def test_a_schema_can_change_as_often_as_rows_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = StateSchema(KEY, schema(n=pa.int64()), (schema(n=pa.int64()),) * 300).encode_values
    assert numbers(pa.record_batch({"n": [1]}))[0].as_py()[:2] == (300).to_bytes(2, "little")
    assert MAX_HISTORY == 65_535
    for module in (schema_module, schema_module):
        monkeypatch.setattr(module, "MAX_HISTORY", 2)
    state = chain(BASIC, ADDED, BASIC)
    with pytest.raises(IncompatibleSchemaError, match="changed 2 times, which is as often as it can"):
        evolved_schema(state, StateSchema(KEY, ADDED))
    assert evolved_schema(state, StateSchema(KEY, BASIC)) == state
    with pytest.raises(InvalidStateStoreArgument, match="has 3 earlier ones; at most 2"):
        StateSchema(KEY, BASIC, (BASIC, ADDED, BASIC))


@settings(deadline=None, max_examples=examples(15))
@given(histories())
def test_every_step_of_a_history_can_be_read_from_all_before_it(schemas: list[pa.Schema]) -> None:
    for i, later in enumerate(schemas):
        assert [evolution_problem(earlier, later) for earlier in schemas[: i + 1]] == [None] * (i + 1)


# -- the variables of an operator -----------------------------------------------------------------

COUNTS = StateSchema(KEY, schema(n=pa.int32()))
WIDER = StateSchema(KEY, schema(n=pa.int64()))
TEXTS = StateSchema(KEY, schema(n=pa.string()))
ENTRIES = StateSchema(schema(k=pa.int64(), u=pa.string()), schema(n=pa.int32()))


def value(name: str, state: StateSchema = COUNTS, **how: Any) -> StateVariable:
    return StateVariable(name, "value", {name: state}, **how)


def map_of(name: str, entries: StateSchema = ENTRIES) -> StateVariable:
    return StateVariable(name, "map", {name: COUNTS, f"{name}.-entries": entries})


def deleted(name: str) -> StateVariable:
    return StateVariable(name, "value", {}, deleted=True)


def operator(*variables: StateVariable, **how: Any) -> OperatorSchema:
    return OperatorSchema(variables, **how)


def go_on(stored: OperatorSchema | None, *programs: OperatorSchema) -> OperatorSchema:
    """Program after program, each of them registered more than once: by its driver, and by hosts with the result."""
    for program in programs:
        made = evolved(stored, program)
        assert evolved(stored, made) == evolved(made, made) == evolved(made, program) == made
        assert OperatorSchema.from_json(made.to_json()) == made
        families = [name for v in made.variables for name in v.families]
        assert len(set(families)) == len(families)
        stored = made
    assert stored is not None
    return stored


def test_variables_are_added_kept_and_widened() -> None:
    made = go_on(None, operator(value("a"), map_of("m")), operator(value("b"), value("a", WIDER)))
    assert [(v.name, v.deleted) for v in made.variables] == [("a", False), ("m", False), ("b", False)]
    assert made.variable("a").families == {"a": StateSchema(KEY, WIDER.value, (COUNTS.value,))}
    assert made.variable("m") == map_of("m")


def test_a_deleted_variable_that_comes_back_is_empty() -> None:
    made = go_on(None, operator(value("a"), map_of("m")), operator(value("a"), deleted("m")))
    assert [(v.name, v.kind, v.deleted) for v in made.variables] == [("a", "value", False), ("m", "map", True)]
    with pytest.raises(InvalidStateStoreArgument, match="'a'"):
        made.variable("m")
    texts = StateSchema(ENTRIES.key, schema(n=pa.string()))
    made = go_on(made, operator(value("a")), operator(value("a"), map_of("m", texts)))
    m = made.variable("m")
    assert m.families == {"m.-2": COUNTS, "m.-entries.-2": texts}
    assert (m.family("m"), m.family("m.-entries")) == ("m.-2", "m.-entries.-2")
    made = go_on(made, operator(deleted("m")), operator(map_of("m")))
    assert list(made.variable("m").families) == ["m.-3", "m.-entries.-3"]
    assert made.variable("a").family("a") == "a"
    with pytest.raises(InvalidStateStoreArgument, match=r"'x'.*'m'|'m'.*'x'"):
        made.variable("m").family("x")


def test_deleting_a_missing_variable_does_nothing() -> None:
    assert go_on(None, operator(deleted("a"))) == operator()
    assert go_on(None, operator(value("b")), operator(value("b"), deleted("a"))) == operator(value("b"))


def test_a_variable_deleted_and_declared_again_continues_if_it_can() -> None:
    first = operator(value("a"))
    made = go_on(first, operator(deleted("a"), value("a", WIDER)))
    assert made.variable("a").families["a"].history == (COUNTS.value,)
    made = go_on(first, operator(deleted("a"), value("a", TEXTS)))
    assert [(v.deleted, dict(v.families)) for v in made.variables] == [(True, {"a": COUNTS}), (False, {"a.-2": TEXTS})]
    # The program stays as it is: it is not emptied again.
    assert go_on(made, operator(deleted("a"), value("a", TEXTS))) == made


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (operator(StateVariable("a", "list", {"a": COUNTS})), r"INVALID_VARIABLE_TYPE_CHANGE.*was a value.* a list"),
        (operator(value("a", TEXTS)), r"'a'.*'n' was integer.*Stored: \(n integer\). Program: \(n string\)"),
        (operator(value("a", ttl_ms=1000)), r"cannot have a TTL from now on.*Stored: value a: .*TTL of 1000 ms"),
        (operator(value("a", ENTRIES)), r"'a'.*Stored: \(k long\). Program: \(k long, u string\)"),
        (operator(StateVariable("a", "value", {"a": COUNTS, "a.-x": COUNTS})), "other column families"),
        (
            operator(value("a"), settings={"time_mode": "eventtime"}),
            "time_mode cannot change from 'none' to 'eventtime'",
        ),
        (operator(value("a"), key_columns=("j",)), r"Stored: \(k\). Program: \(j\)"),
        (OperatorSchema.of_rows(COUNTS), r"Stored: value a: .*Program: rows default: "),
    ],
)
def test_an_incompatible_schema_is_refused_naming_both_sides(declared: OperatorSchema, words: str) -> None:
    stored = operator(value("a"), key_columns=("k",), settings={"time_mode": "none"})
    assert go_on(stored, operator(value("a"))) == stored
    with pytest.raises(IncompatibleSchemaError, match=words):
        evolved(stored, declared)


def test_the_length_of_a_ttl_may_change_but_not_whether_there_is_one() -> None:
    made = go_on(operator(value("a", ttl_ms=1000)), operator(value("a", ttl_ms=5)))
    assert made.variable("a").ttl_ms == 5
    with pytest.raises(IncompatibleSchemaError, match="without the TTL that it had"):
        evolved(made, operator(value("a")))


def test_rows_of_an_operator_are_exactly_as_they_were() -> None:
    rows = OperatorSchema.of_rows(COUNTS)
    assert go_on(None, rows, rows) == rows and rows.to_json() == COUNTS.to_json()
    with pytest.raises(IncompatibleSchemaError, match=r"n integer.*n long"):
        evolved(rows, OperatorSchema.of_rows(WIDER))
    # Older releases did not write the order of the key's columns down.
    assert go_on(rows, OperatorSchema.of_rows(COUNTS, ("k",))) == rows
    windows = OperatorSchema.of_rows(ENTRIES, ("u", "k"))
    with pytest.raises(IncompatibleSchemaError):
        evolved(OperatorSchema.of_rows(ENTRIES), windows)
    sessions = operator(StateVariable("default", "rows", {"default": COUNTS, "sessions.-ends": ENTRIES}))
    assert go_on(None, sessions, sessions) == sessions


def test_a_name_is_given_to_one_variable_only() -> None:
    with pytest.raises(InvalidStateStoreArgument, match="'a' is declared twice"):
        operator(value("a"), map_of("a"))


def test_compacted_it_has_neither_history_nor_deleted_variables() -> None:
    made = go_on(operator(value("a"), value("b")), operator(value("a", WIDER), deleted("b")))
    made = go_on(made, operator(value("a", WIDER), value("b", TEXTS)))
    assert made.compacted() == operator(value("a", WIDER), StateVariable("b", "value", {"b.-2": TEXTS}))
    # A compacted operator can be continued as well, and with narrower types than before.
    assert go_on(made.compacted(), operator(value("b", TEXTS), value("a", WIDER))) == made.compacted()


PROGRAMS = st.lists(
    st.fixed_dictionaries(
        {name: st.sampled_from(["absent", "value", "wider", "map", "deleted", "afresh"]) for name in ("a", "b")}
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=examples(60))
@given(PROGRAMS)
def test_no_program_ever_sees_rows_of_a_variable_that_was_deleted(programs: list[dict[str, str]]) -> None:
    made: OperatorSchema | None = None
    seen: dict[str, set[str]] = {}  # families that had rows of variables deleted since
    for choice in programs:
        variables: list[StateVariable] = []
        for name, how in choice.items():
            variables += [deleted(name)] if how in ("deleted", "afresh") else []
            variables += [value(name)] if how == "value" else [value(name, WIDER)] if how == "wider" else []
            variables += [map_of(name)] if how in ("map", "afresh") else []
        try:
            made = go_on(made, operator(*variables))
        except IncompatibleSchemaError:
            continue
        for name, how in choice.items():
            gone = {f for v in made.variables if v.name == name and v.deleted for f in v.families}
            live = {f for v in made.variables if v.name == name and not v.deleted for f in v.families}
            assert seen.get(name, set()) <= gone and not live & gone
            assert how in ("absent", "deleted") or made.variable(name).kind == (
                "map" if how in ("map", "afresh") else "value"
            )
            seen[name] = gone
