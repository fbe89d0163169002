"""A state variable as a processor declares it in ``init``; ``state_format.layouts`` has the columns that are kept."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import types as T

from backends.conf import DEFAULT_FAMILY, check_name
from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError
from spark_bridge.exceptions import HandleStateError, StateDeclarationError, StatefulProcessorError
from spark_bridge.state_format import layouts
from spark_bridge.stateful.state_values import RowCodec
from spark_bridge.task.task_store import StateAccess


@dataclass(frozen=True)
class Declaration:
    """A state variable: its name, kind (``VALUE``, ``LIST`` or ``MAP``) and schemas.

    ``value`` are the fields of a value, of an element, or of an entry's value; ``user_key`` those of the key of a map's
    entries. ``ttl_ms`` is how long a value lives (None: it never expires).
    """

    name: str
    kind: str
    value: T.StructType
    user_key: T.StructType | None = None
    ttl_ms: int | None = None

    @cached_property
    def codec(self) -> RowCodec:
        """Return the codec of values, elements or the values of entries. All fields may be null."""
        return RowCodec(_nullable(self.value))

    @cached_property
    def key_codec(self) -> RowCodec:
        """Return the codec of the keys of a map's entries. All fields may be null."""
        return RowCodec(_nullable(self.user_key or T.StructType()))

    def variable(self, key_schema: pa.Schema) -> StateVariable:
        """Return the stored variable for grouping keys of ``key_schema``; raises ``StateDeclarationError``."""
        self._check()
        try:
            families = self._families(key_schema)
            for family in families:
                check_name("a column family; the name of its state variable is too long", family)
        except (InvalidStateStoreArgument, UnsupportedTypeError) as error:
            raise StateDeclarationError(f"State variable {self.name!r} cannot be kept: {error}") from error
        return StateVariable(self.name, self.kind, families, self.ttl_ms)

    def _check(self) -> None:
        check_variable_name(self.name)
        for struct in (self.value, self.user_key):
            if struct is None:
                continue
            if not struct.fields:
                raise StateDeclarationError(
                    f"State variable {self.name!r} has a schema without fields. Name at least one, such as 'value INT'."
                )
            if layouts.TTL_COLUMN in struct.names:
                raise StateDeclarationError(
                    f"State variable {self.name!r} has a field {layouts.TTL_COLUMN!r}, which is the name of the column "
                    "for its TTL. Rename the field."
                )

    def _families(self, keys: pa.Schema) -> dict[str, StateSchema]:
        user_key, value = list(self.key_codec.schema), list(self.codec.schema)
        return layouts.families_of(self.kind, self.name, keys, user_key, value, has_ttl=self.ttl_ms is not None)


def check_variable_name(name: str) -> None:
    """Raise ``StateDeclarationError`` for an invalid name of a state variable, as Spark does."""
    if not isinstance(name, str) or not name or name != name.strip() or name == DEFAULT_FAMILY:
        raise StateDeclarationError(
            f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {name!r} cannot be the name of a state "
            f"variable: give a string that is not {DEFAULT_FAMILY!r} and neither begins nor ends with a blank."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise StateDeclarationError(
            f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {name!r} cannot be the name of a state "
            f"variable: it is not valid Unicode ({error.reason})."
        ) from error


def _nullable(data_type: T.DataType) -> T.DataType:
    """Return the type with every field nullable: old rows may have undeclared nulls."""
    if isinstance(data_type, T.StructType):
        return T.StructType([T.StructField(f.name, _nullable(f.dataType), True) for f in data_type.fields])
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(_nullable(data_type.elementType), True)
    if isinstance(data_type, T.MapType):
        return T.MapType(_nullable(data_type.keyType), _nullable(data_type.valueType), True)
    return data_type


# Objects that the state variables of a processor share: the keys of the step, the current key, the store, figures.


INT64_MAX = (1 << 63) - 1


@dataclass
class StateFigures:
    """Counts of a processor's work on its state: rows written and removed, and further figures under Spark's names."""

    num_rows_updated: int = 0
    num_rows_removed: int = 0
    custom: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, n: int = 1) -> None:
        self.custom[name] = self.custom.get(name, 0) + n


@dataclass(frozen=True)
class NoKey:
    """Placeholder for the number of the current key if there is none: use as a number raises ``HandleStateError``."""

    phase: str

    def __index__(self) -> int:
        raise invalid_handle_state("access to a state variable", self.phase)


PRE_INIT = NoKey("PRE_INIT")
CREATED = NoKey("CREATED")
INITIALIZED = NoKey("INITIALIZED")
CLOSED = NoKey("CLOSED")
_IN_INIT = (
    "init() only declares state variables: use them in handleInputRows, handleExpiredTimer or handleInitialState."
)
_REMEDIES = {"PRE_INIT": _IN_INIT, "CREATED": _IN_INIT, "CLOSED": "The batch is over: close() can use no state."}


def invalid_handle_state(operation: str, phase: str) -> HandleStateError:
    """Return the error for an operation that the phase does not allow; ``phase`` is in Spark's words."""
    remedy = _REMEDIES.get(phase, "Declare state variables in init() only, and use them only while a key is handled.")
    return HandleStateError(
        f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] Cannot perform {operation} with "
        f"invalid handle state={phase}. {remedy}"
    )


class KeyStep:
    """The sorted distinct stored keys of one step; ``index`` is the number of the current key, or a ``NoKey``.

    ``store`` None: on the driver, where state variables are declared only.
    """

    __slots__ = ("_last", "_store", "figures", "index", "keys", "timestamp_ms")

    def __init__(self, store: StateAccess | None) -> None:
        self._store = store
        self.timestamp_ms = store.times.timestamp_ms if store is not None else 0
        self.figures = StateFigures()
        self.keys: pa.BinaryArray = pa.array([], pa.binary())
        self.index: Any = PRE_INIT if store is None else CREATED
        self._last = b""

    @property
    def store(self) -> StateAccess:
        """Return the partition's state; raises ``HandleStateError`` on the driver."""
        if self._store is None:
            raise invalid_handle_state("access to the state store", "PRE_INIT")
        return self._store

    def restart(self, store: StateAccess) -> None:
        """Move to another micro-batch and its state, at its first key."""
        self._store = store
        self.timestamp_ms = store.times.timestamp_ms
        self.figures = StateFigures()
        self._last = b""
        self.begin(pa.array([], pa.binary()))

    def begin(self, keys: pa.BinaryArray) -> None:
        """Move to other keys; raises ``StatefulProcessorError`` unless they are after all earlier keys."""
        if len(keys):
            if self._last and keys[0].as_py() <= self._last:
                raise StatefulProcessorError(
                    f"The keys of a step begin with {keys[0].as_py().hex()}, which is not after {self._last.hex()}, "
                    "the last one of the step before: a key's changes would be lost."
                )
            self._last = keys[-1].as_py()
        self.keys = keys
        self.index = INITIALIZED

    @property
    def current(self) -> int:
        """Return the number of the current key; raises ``HandleStateError`` if there is none."""
        return operator.index(self.index)

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray | None, family: str) -> None:
        """Add the values of keys to the commit; with ``values`` None, the removal of the keys."""
        if len(keys):
            self.store.stage(keys, pa.nulls(len(keys), pa.binary()) if values is None else values, family)


# The object of a state variable that ``init`` has declared and then deleted: every use is an error.


_DOING = {
    "exists": "checking {kind} state exists",
    "get": "getting {kind} state",
    "getValue": "getting value",
    "containsKey": "checking if {kind} state contains key",
    "clear": "clearing {kind} state",
    "removeKey": "removing key from {kind} state",
}


class DeletedStateError(HandleStateError, PySparkRuntimeError):  # type: ignore[misc]
    """A state variable was used that ``init`` has declared and then deleted; of PySpark's own class, too."""


class DeletedState:
    """A state variable whose every method raises ``DeletedStateError``, in the words of PySpark's error."""

    def __init__(self, name: str, kind: str) -> None:
        self._name = name
        self._kind = kind

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        doing = _DOING.get(method, "updating {kind} state").format(kind=self._kind)
        message = (
            f"Error {doing}: {self._kind.capitalize()} state {self._name} is not initialized. init() has deleted it "
            "after it had declared it: leave out deleteIfExists, or the variable."
        )

        def refuse(*_: object, **__: object) -> NoReturn:
            raise DeletedStateError(message)

        return refuse


def make_deleted(state: Any, name: str, kind: str) -> None:
    """Turn a state variable's object that the processor holds into a ``DeletedState``."""
    vars(state).clear()
    state.__class__ = DeletedState
    state.__init__(name, kind)


# PySpark's classes of ``transformWithState``. Ours are subclasses of them if PySpark has them (from 4.0 on).
#
# So a processor may ask ``isinstance(state, pyspark.sql.streaming.stateful_processor.ValueState)``. Ours inherit
# nothing else: each public method of PySpark's is one of ours. On Spark 3.5 each name here is ``object``.


if TYPE_CHECKING or find_spec("pyspark.sql.streaming.stateful_processor") is None:
    PySparkValueState = object
    PySparkListState = object
    PySparkMapState = object
    PySparkStatefulProcessorHandle = object
    PySparkTimerValues = object
    PySparkExpiredTimerInfo = object
else:
    from pyspark.sql.streaming import stateful_processor as theirs

    PySparkValueState = theirs.ValueState
    PySparkListState = theirs.ListState
    PySparkMapState = theirs.MapState
    PySparkStatefulProcessorHandle = theirs.StatefulProcessorHandle
    PySparkTimerValues = theirs.TimerValues
    PySparkExpiredTimerInfo = theirs.ExpiredTimerInfo
