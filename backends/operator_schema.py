"""What one operator keeps: state variables, each in one or more column families of typed keys and values.

An operator with a single variable of its own rows (an aggregate) is written as that variable's
``StateSchema`` alone. Spark's counterpart is the state schema file of ``transformWithState``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.changelog import DEFAULT_FAMILY
from backends.exceptions import InvalidStateStoreArgument
from backends.schema import StateSchema

KINDS = ("rows", "value", "list", "map", "timers")


@dataclass(frozen=True)
class StateVariable:
    """One state variable. ``families`` maps the column families it is kept in to their schemas.

    ``kind``: "rows" for the rows of an aggregate, else what ``StatefulProcessorHandle`` makes: "value", "list",
    "map", "timers". ``deleted``: it is no longer used, and what is left of it may be removed.
    """

    name: str
    kind: str
    families: Mapping[str, StateSchema] = field(hash=False)
    ttl_ms: int | None = None
    deleted: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidStateStoreArgument(f"{self.kind!r} is no kind of state variable; there are {', '.join(KINDS)}.")


@dataclass(frozen=True)
class OperatorSchema:
    """The state variables of one operator, and the order in which its user names the columns of a key.

    ``key_columns`` differs from the stored order where a window is stored first, so that closed ones lie together.
    """

    variables: tuple[StateVariable, ...]
    key_columns: tuple[str, ...] = ()

    @classmethod
    def of_rows(cls, schema: StateSchema, key_columns: tuple[str, ...] = ()) -> OperatorSchema:
        """The schema of an operator that keeps one row per key."""
        return cls((StateVariable(DEFAULT_FAMILY, "rows", {DEFAULT_FAMILY: schema}),), key_columns)

    @property
    def families(self) -> dict[str, StateSchema]:
        """All column families and their schemas."""
        return {name: schema for v in self.variables for name, schema in v.families.items()}

    def variable(self, name: str) -> StateVariable:
        """A variable that is in use, by name; raises ``InvalidStateStoreArgument`` naming those that there are."""
        for variable in self.variables:
            if variable.name == name and not variable.deleted:
                return variable
        known = ", ".join(repr(v.name) for v in self.variables if not v.deleted)
        raise InvalidStateStoreArgument(f"There is no state variable {name!r}; there are {known or 'none'}.")

    def to_json(self) -> str:
        """Canonical JSON: equal schemas give equal text."""
        if not self.key_columns and len(self.variables) == 1 and self.variables[0].kind == "rows":
            (schema,) = self.variables[0].families.values()
            return schema.to_json()
        content = {
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
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> OperatorSchema:
        """Read what ``to_json`` wrote; raises ``InvalidStateStoreArgument``."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidStateStoreArgument(f"An operator's schema is not JSON: {error}") from error
        match content:
            case {"variables": list(variables), "key_columns": list(key_columns)}:
                return cls(tuple(_variable(v) for v in variables), tuple(key_columns))
        return cls.of_rows(StateSchema.from_json(text))

    @property
    def id(self) -> str:
        """A short digest of the canonical JSON: the name of the schema's file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


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
    raise InvalidStateStoreArgument(f"{content!r} is no state variable as OperatorSchema.to_json() writes it.")
