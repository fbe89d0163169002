"""The schema of an operator's state: its state variables, each in one or more column families of typed keys and values.

An operator with a single variable of rows (an aggregate) is written as the ``StateSchema`` of that variable alone.
Spark's counterpart is the state schema file of ``transformWithState``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import RESERVED_PREFIX
from backends.encoding.schema import StateSchema, columns_in_words, evolved_outputs, evolved_schema
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument

TIMERS = "timers"
"""The kind, and the name, of the variable that has the timers of a processor."""
VARIABLE_KINDS = ("rows", "value", "list", "map", TIMERS)
ROLLING_KIND = "rolling_aggregate"
AGGREGATE_KINDS = ("aggregate", "session_aggregate", ROLLING_KIND)
"""The kinds of operators whose rows are the states of outputs."""
HORIZONS = "rolling"
"""The setting that has the horizons of rolling aggregates: the only one that may change at a restart."""
NO_COLUMNS = pa.schema([])
INDEX_FAMILY = DEFAULT_FAMILY + ".-index-"
"""Begins the name of a secondary index's family, whose keys are those of the rows after the indexed column."""
INDEXED_PREFIX = RESERVED_PREFIX + "by_"
"""Begins the first key column of such a family. The name of the indexed column follows."""
_GENERATION = re.compile(r"(.+)\.-(\d+)")
"""The families of a variable that was deleted and declared again are numbered: the earlier rows are not theirs."""


@dataclass(frozen=True)
class StateVariable:
    """One state variable. ``families`` maps the names of its column families to their schemas.

    ``kind``: "rows" for the rows of an aggregate, else what ``StatefulProcessorHandle`` makes: "value", "list", "map",
    "timers". ``deleted``: the variable is no longer used, and its remaining rows may be removed. A program that deletes
    a variable need not give its families. ``ttl_ms`` is the time to live in milliseconds; None for no end.
    """

    name: str
    kind: str
    families: Mapping[str, StateSchema] = field(hash=False)
    ttl_ms: int | None = None
    deleted: bool = False

    @property
    def identity(self) -> tuple[str, bool]:
        """Name and kind, which tell variables apart: a user may give a variable the name of the timers."""
        return self.name, self.kind == TIMERS

    def __post_init__(self) -> None:
        if self.kind not in VARIABLE_KINDS:
            raise InvalidStateStoreArgument(
                f"{self.kind!r} is not a kind of state variable; the kinds are {', '.join(VARIABLE_KINDS)}."
            )

    @property
    def indexes(self) -> dict[str, str]:
        """The columns that have a secondary index, and the column family of each index."""
        return {
            schema.key.field(0).name.removeprefix(INDEXED_PREFIX): name
            for name, schema in sorted(self.families.items())
            if self.kind == "rows" and name.startswith(INDEX_FAMILY)
        }

    def family(self, declared: str) -> str:
        """Return the stored column family that the program calls ``declared``.

        The names differ if an earlier variable of the same name was deleted. Raises ``InvalidStateStoreArgument``.
        """
        for name in self.families:
            if _declared(name) == declared:
                return name
        raise InvalidStateStoreArgument(
            f"State variable {self.name!r} has no column family {declared!r}; it has "
            f"{', '.join(self.families) or 'none'}."
        )


@dataclass(frozen=True)
class OperatorSchema:
    """The state variables of one operator, and the order of the key columns in the user's program.

    ``key_columns`` differs from the stored order if a window is stored first, so that closed windows are adjacent.
    ``settings`` are other parts of the program that must not change, because the meaning of the state depends on them,
    such as the time mode of timers. If several variables have the same name, at most one of them is not deleted, apart
    from the timers.
    """

    variables: tuple[StateVariable, ...]
    key_columns: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        identities = [v.identity for v in self.variables if not v.deleted]
        for identity in identities:
            if identities.count(identity) > 1:
                raise InvalidStateStoreArgument(
                    f"State variable {identity[0]!r} is declared twice; give each declaration a different name."
                )

    @classmethod
    def of_rows(cls, schema: StateSchema, key_columns: tuple[str, ...] = ()) -> OperatorSchema:
        """Return the schema of an operator that keeps one row per key."""
        return cls((StateVariable(DEFAULT_FAMILY, "rows", {DEFAULT_FAMILY: schema}),), key_columns)

    @property
    def families(self) -> dict[str, StateSchema]:
        """All stored column families and their schemas."""
        return {name: schema for v in self.variables for name, schema in v.families.items()}

    @property
    def in_use(self) -> tuple[StateVariable, ...]:
        """The variables that are not deleted, one of each name: a user's variable hides timers of the same name."""
        variables = [v for v in self.variables if not v.deleted]
        of_users = {v.name for v in variables if v.kind != TIMERS}
        return tuple(v for v in variables if v.kind != TIMERS or v.name not in of_users)

    @property
    def timers(self) -> StateVariable | None:
        """The variable that has the timers; None if there are none."""
        return next((v for v in self.variables if v.kind == TIMERS and not v.deleted), None)

    def variable(self, name: str) -> StateVariable:
        """Return a variable that is in use, by name. Raises ``InvalidStateStoreArgument`` naming those in use."""
        for variable in self.in_use:
            if variable.name == name:
                return variable
        names = ", ".join(repr(v.name) for v in self.in_use)
        raise InvalidStateStoreArgument(f"State variable {name!r} does not exist; there are {names or 'none'}.")

    def compacted(self) -> OperatorSchema:
        """Return the schema after all rows are rewritten and deleted variables are removed, as in a savepoint."""
        variables = (
            replace(v, families={name: replace(schema, history=()) for name, schema in v.families.items()})
            for v in self.variables
            if not v.deleted
        )
        return replace(self, variables=tuple(variables))

    def to_json(self) -> str:
        """Return canonical JSON: equal schemas give equal strings."""
        rows = self.variables[0].families.get(DEFAULT_FAMILY) if len(self.variables) == 1 else None
        if rows is not None and self == OperatorSchema.of_rows(rows):
            return rows.to_json()
        content: dict[str, object] = {
            "variables": [
                {
                    "name": v.name,
                    "kind": v.kind,
                    "ttl_ms": v.ttl_ms,
                    "deleted": v.deleted,
                    "families": {name: json.loads(schema.to_json()) for name, schema in v.families.items()},
                }
                for v in self.variables
            ],
            "key_columns": list(self.key_columns),
        }
        if self.settings:
            content["settings"] = dict(self.settings)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> OperatorSchema:
        """Read what ``to_json`` wrote; raises ``InvalidStateStoreArgument``."""
        return _from_json(text)

    @property
    def id(self) -> str:
        """A short digest of the canonical JSON: the name of the schema's file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@lru_cache(maxsize=256)
def _from_json(text: str) -> OperatorSchema:
    """Parse each string once, which takes 0.5 ms: tasks, loads and readers request the same few schemas."""
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidStateStoreArgument(f"An operator's schema is not JSON: {error}") from error
    match content:
        case {"variables": list(variables), "key_columns": list(key_columns)}:
            written = content.get("settings", {})
            if not isinstance(written, dict):
                raise InvalidStateStoreArgument(
                    f"The settings of an operator's schema must be an object, not {written!r}."
                )
            settings = {str(name): str(value) for name, value in written.items()}
            return OperatorSchema(tuple(_variable(v) for v in variables), tuple(key_columns), settings)
    return OperatorSchema.of_rows(StateSchema.from_json(text))


def _variable(content: object) -> StateVariable:
    match content:
        case {
            "name": str(name),
            "kind": str(kind),
            "ttl_ms": int() | None as ttl_ms,
            "deleted": bool(deleted),
            "families": dict(families),
        }:
            schemas = {family: StateSchema.from_json(json.dumps(schema)) for family, schema in families.items()}
            return StateVariable(name, kind, schemas, ttl_ms, deleted)
    raise InvalidStateStoreArgument(f"{content!r} is not a state variable as OperatorSchema.to_json() writes it.")


def evolved(stored: OperatorSchema | None, declared: OperatorSchema, kind: str = "") -> OperatorSchema:
    """Return the schema for continuing the state ``stored`` (None: no state) with a program's ``declared``.

    Variables that the program does not declare stay, unused. A variable that the program deletes becomes a deleted one.
    If the program also declares the variable again, the old one is deleted only if the new declaration cannot continue
    it: otherwise every restart would empty the variable. Rows of an operator without such variables must be exactly as
    they were, except for the outputs of an aggregate, depending on the operator's ``kind``.

    The result is stable: declaring it, or the program's own declaration, again does not change it. Raises
    ``IncompatibleSchemaError`` naming both sides; callers add the operator and the remedy.
    """
    if any(v.kind == "rows" for v in (*declared.variables, *(stored.variables if stored else ()))):
        if stored is not None and stored.families == declared.families:
            _check_settings(stored, declared)
        return _evolved_rows(stored, declared, may_change_outputs=kind in AGGREGATE_KINDS)
    if stored is None:
        stored = replace(declared, variables=())
    _check_settings(stored, declared)
    deleted = {v.identity for v in declared.variables if v.deleted}
    new = {v.identity: v for v in declared.variables if not v.deleted}
    variables: list[StateVariable] = []
    for variable in stored.variables:
        again = None if variable.deleted else new.get(variable.identity)
        if again is None:
            variables.append(replace(variable, deleted=variable.deleted or variable.identity in deleted))
            continue
        try:
            variables.append(_evolved_variable(variable, again))
        except IncompatibleSchemaError:
            if variable.identity not in deleted:
                raise
            variables.append(replace(variable, deleted=True))
        else:
            del new[variable.identity]
    variables += [
        _beginning(v, [earlier for earlier in variables if earlier.identity == v.identity]) for v in new.values()
    ]
    return OperatorSchema(
        tuple(variables), stored.key_columns or declared.key_columns, {**stored.settings, **declared.settings}
    )


def horizons_since(stored: str, declared: str, watermark_us: int) -> str:
    """Return the declared setting ``HORIZONS`` of a restarted query, and since when each is complete.

    A setting is JSON: for each output its name and its horizons, each with name, microseconds, hop, and that time (0:
    always), in microseconds since 1970. Rows before the longest stored horizon, as of ``watermark_us``, may have been
    removed. Rows before the watermark may be in tiles that are too long for a shorter hop. A new output lacks the rows
    of earlier batches, which reach the watermark at least.
    """
    before = json.loads(stored)
    horizons = [(us, hop, since) for _, output in before for _, us, hop, since in output]
    oldest = max(0, watermark_us - max(us for us, _, _ in horizons))
    of_output = {name: min(since for *_, since in output) for name, output in before}

    def since(output: str, us: int, hop: int) -> int:
        longer = [(of_hop, earlier) for length, of_hop, earlier in horizons if length >= us]
        fitting = [earlier for of_hop, earlier in longer if of_hop <= hop]
        of_tiles: int = min(fitting) if fitting else watermark_us if longer else oldest
        of_rows: int = of_output.get(output, watermark_us)
        return max(of_tiles, of_rows)

    outputs = json.loads(declared)
    return json.dumps([[o, [[name, us, hop, since(o, us, hop)] for name, us, hop, _ in hs]] for o, hs in outputs])


def _evolved_rows(
    stored: OperatorSchema | None, declared: OperatorSchema, *, may_change_outputs: bool
) -> OperatorSchema:
    if stored is None:
        return declared
    old, new = stored.families, declared.families
    if _without_values(stored) == _without_values(declared):
        if HORIZONS in declared.settings:
            stored = replace(stored, settings={**stored.settings, HORIZONS: declared.settings[HORIZONS]})
        if all(old[name].value.equals(new[name].value) for name in old):
            return stored
        if may_change_outputs:
            families = {
                name: schema if schema.value.equals(new[name].value) else evolved_outputs(schema, new[name])
                for name, schema in old.items()
            }
            (rows,) = stored.variables
            return replace(stored, variables=(replace(rows, families=families),))
    if (before := _indexed(stored)) != (after := _indexed(declared)):
        raise IncompatibleSchemaError(
            f"The stored rows have {before or 'no index'}, and the program declares {after or 'no index'}. An index is "
            "built from the rows, or removed, by rewrite_state with program= and a function that returns its rows."
        )
    raise IncompatibleSchemaError(f"Stored: {_in_words(stored)}. Program: {_in_words(declared)}.")


def _indexed(schema: OperatorSchema) -> str:
    """Return the secondary indexes of an operator of rows as its declaration has them; "" if there are none."""
    columns = [column for variable in schema.variables for column in variable.indexes]
    return f"index={tuple(columns)!r}" if columns else ""


def _without_values(schema: OperatorSchema) -> OperatorSchema:
    """Return all of an operator of rows that must not change: variables, families and their keys."""
    variables = (
        replace(v, families={name: StateSchema(s.key, NO_COLUMNS) for name, s in v.families.items()})
        for v in schema.variables
    )
    fixed = {name: value for name, value in schema.settings.items() if name != HORIZONS}
    return replace(_in_stored_order(schema), variables=tuple(variables), settings=fixed)


def _in_stored_order(schema: OperatorSchema) -> OperatorSchema:
    """Return the schema as it is written: without ``key_columns`` if these are in their stored order."""
    orders = {tuple(s.key.names) for s in schema.families.values()}
    return replace(schema, key_columns=()) if orders == {schema.key_columns} else schema


def _check_settings(stored: OperatorSchema, declared: OperatorSchema) -> None:
    for name in (stored.settings.keys() & declared.settings.keys()) - {HORIZONS}:
        old, new = stored.settings[name], declared.settings[name]
        if old != new:
            raise IncompatibleSchemaError(
                f"[STATE_STORE_INVALID_CONFIG_AFTER_RESTART] {name} cannot change from {old!r} to {new!r}: "
                "the stored state would change its meaning."
            )
    if stored.key_columns and declared.key_columns and stored.key_columns != declared.key_columns:
        raise IncompatibleSchemaError(
            "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] The columns of a key cannot change. "
            f"Stored: ({', '.join(stored.key_columns)}). Program: ({', '.join(declared.key_columns)})."
        )


def _evolved_variable(stored: StateVariable, declared: StateVariable) -> StateVariable:
    sides = f"Stored: {_variable_in_words(stored)}. Program: {_variable_in_words(declared)}."
    if stored.kind != declared.kind:
        raise IncompatibleSchemaError(
            f"[STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE] State variable {stored.name!r} was a {stored.kind} and cannot "
            f"become a {declared.kind}. {sides}"
        )
    if (stored.ttl_ms is None) != (declared.ttl_ms is None):
        change = "have a TTL from now on" if stored.ttl_ms is None else "be without the TTL that it had"
        raise IncompatibleSchemaError(
            "[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] Schema evolution is not possible: state variable "
            f"{stored.name!r} cannot {change}. {sides}"
        )
    here = {_declared(name): schema for name, schema in declared.families.items()}
    if {_declared(name) for name in stored.families} != here.keys():
        raise IncompatibleSchemaError(f"State variable {stored.name!r} is kept in other column families. {sides}")
    try:
        families = {name: evolved_schema(schema, here[_declared(name)]) for name, schema in stored.families.items()}
    except IncompatibleSchemaError as error:
        raise IncompatibleSchemaError(f"State variable {stored.name!r}: {error}") from error
    return replace(stored, families=families, ttl_ms=declared.ttl_ms)


def _beginning(declared: StateVariable, earlier: Iterable[StateVariable]) -> StateVariable:
    """Return a variable that begins without rows. It gets new families if earlier variables had its name."""
    generation = max((_generation(name) for v in earlier for name in v.families), default=0) + 1
    suffix = f".-{generation}" if generation > 1 else ""
    families = {_declared(name) + suffix: replace(s, history=()) for name, s in declared.families.items()}
    return replace(declared, families=families)


def _declared(family: str) -> str:
    match = _GENERATION.fullmatch(family)
    return match[1] if match else family


def _generation(family: str) -> int:
    match = _GENERATION.fullmatch(family)
    return int(match[2]) if match else 1


def _in_words(schema: OperatorSchema) -> str:
    return "; ".join(_variable_in_words(v) for v in schema.variables if not v.deleted) or "nothing"


def _variable_in_words(variable: StateVariable) -> str:
    ttl = "" if variable.ttl_ms is None else f" with a TTL of {variable.ttl_ms} ms"
    schemas = [f"key {columns_in_words(s.key)}, state {columns_in_words(s.value)}" for s in variable.families.values()]
    return f"{variable.kind} {variable.name}{ttl}: {', '.join(schemas)}"
