"""The options of the format ``ray_statestore``, with the names of Spark's state data source if it has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa
from msgspec import structs

from backends.encoding.operator_schema import TIMERS
from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.formats.manifest import Lineage
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions, find_state
from spark_bridge.state_data.state_sources import StateSource, changes_source, state_source

STORAGE_PREFIX = "storage."
NAMES = (
    "path",
    "operator",
    "stateVarName",
    "readRegisteredTimers",
    "batchId",
    "version",
    "at",
    "flattenCollectionTypes",
    "stateColumns",
    "stateLocation",
    "snapshotStartBatchId",
    "readChangeFeed",
    "changeStartBatchId",
    "changeEndBatchId",
    "startingVersion",
    "maxVersionsPerTrigger",
)
_ALSO = {"operatorname": "operator"}
_OF_ROWS = ("batchId", "version", "at", "snapshotStartBatchId")
OF_CHANGES = ("changeStartBatchId", "changeEndBatchId")
OF_STREAMS = ("startingVersion", "maxVersionsPerTrigger")
REQUIRED, CONFLICT, INVALID, UNAVAILABLE = (
    "STDS_REQUIRED_OPTION_UNSPECIFIED",
    "STDS_CONFLICT_OPTIONS",
    "STDS_INVALID_OPTION_VALUE",
    "STDS_COMMITTED_BATCH_UNAVAILABLE",
)
"""Error conditions of Spark's state data source, which programs use to tell errors apart."""
STATE, EARLIEST, LATEST = "state", "earliest", "latest"


@dataclass(frozen=True)
class SourceOptions:
    """The parts of a state source to read.

    - ``path``: the checkpoint location of the query.
    - ``operator``, ``stateVarName``: as ``operator`` and ``state`` of ``state_batches``; ``readRegisteredTimers``
      means ``stateVarName`` "timers".
    - ``batchId`` or ``version`` (the batch's number plus one): for a table of rows, by default the last completed one.
    - ``at``: the time that rolling aggregates are of, in ISO 8601, by default now.
    - ``flattenCollectionTypes`` (true), ``stateColumns`` (false): see ``state_batches``.
    - ``stateLocation``: ``spark.statestore.location`` of the query's session, if it was set.
    - ``storage.NAME``: a setting of the storage, as in ``storage_options``.
    - ``snapshotStartBatchId``: rows are made of the last snapshots up to this batch and the changelogs after them.
    - ``readChangeFeed`` (false): the changes in place of the rows, as ``state_changes_batches`` yields them; for a
      table those of the batches from ``changeStartBatchId`` to ``changeEndBatchId`` (by default the last one), both
      included. A stream is always one of changes, and needs it.
    - ``startingVersion``, ``maxVersionsPerTrigger``: of a stream; see ``ChangeStreamReader``.
    """

    place: StatePlace
    operator: str
    state: str | None = None
    version: int | None = None
    flatten: bool = True
    state_columns: bool = False
    snapshot: int | None = None
    is_changes: bool = False
    first_batch: int = 0
    last_batch: int | None = None
    starting: str | int = STATE
    most_versions: int | None = None
    at: str | None = None
    given: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse the options from Spark; their names are not case-sensitive.

        Raises ``InvalidStateStoreArgument`` naming an option that is unknown, missing, of the wrong form, or that does
        not go with another one; ``MissingFileError`` if the checkpoint has no state.
        """
        names = {name.lower(): name for name in NAMES} | _ALSO
        texts: dict[str, str] = {}
        storage: dict[str, str] = {}
        for name, value in options.items():
            if name.lower().startswith(STORAGE_PREFIX):
                storage[name[len(STORAGE_PREFIX) :]] = value
            elif name.lower() in names:
                texts[names[name.lower()]] = value
            else:
                raise InvalidStateStoreArgument(
                    f"The format ray_statestore has no option {name!r}; there are {', '.join(NAMES)}, and "
                    f"{STORAGE_PREFIX}NAME for settings of the storage."
                )
        for name in ("path", "operator"):
            if not texts.get(name):
                what = "load(checkpoint_location)" if name == "path" else "option('operator', name)"
                raise InvalidStateStoreArgument(
                    f"[{REQUIRED}] '{name}' must be specified: the format ray_statestore needs {what}."
                )
        is_changes = _flag(texts, "readChangeFeed", False)
        _together(texts, is_changes)
        starting = texts.get("startingVersion", STATE)
        batch, version = _number(texts, "batchId"), _number(texts, "version")
        most = _number(texts, "maxVersionsPerTrigger")
        if most == 0:
            raise invalid("maxVersionsPerTrigger", "it is 0, and must be 1 or more.")
        timers = _flag(texts, "readRegisteredTimers", False)
        return cls(
            find_state(texts["path"], texts.get("stateLocation"), storage),
            texts["operator"],
            TIMERS if timers else texts.get("stateVarName"),
            version if batch is None else batch + 1,
            _flag(texts, "flattenCollectionTypes", True),
            _flag(texts, "stateColumns", False),
            _number(texts, "snapshotStartBatchId"),
            is_changes,
            _number(texts, "changeStartBatchId") or 0,
            _number(texts, "changeEndBatchId"),
            starting if starting in (STATE, EARLIEST, LATEST) else _number(texts, "startingVersion") or 0,
            most,
            texts.get("at"),
            frozenset(texts),
        )

    def refuse(self, names: tuple[str, ...], where: str) -> None:
        """Raise ``InvalidStateStoreArgument`` if one of these options is given."""
        if wrong := [name for name in names if name in self.given]:
            raise InvalidStateStoreArgument(f"{where} has no option {wrong[0]!r}: leave it out.")


def _together(texts: Mapping[str, str], is_changes: bool) -> None:
    """Raise ``InvalidStateStoreArgument`` for options that exclude each other."""
    if "batchId" in texts and "version" in texts:
        raise _conflict("batchId", "version", "Both name the version to read")
    if "stateVarName" in texts and _flag(texts, "readRegisteredTimers", False):
        raise _conflict("stateVarName", "readRegisteredTimers", "The second reads timers, not that variable")
    if wrong := [name for name in (_OF_ROWS if is_changes else OF_CHANGES) if name in texts]:
        raise _conflict(wrong[0], "readChangeFeed", f"readChangeFeed is {str(is_changes).lower()}")


def _flag(texts: Mapping[str, str], name: str, default: bool) -> bool:
    value = texts.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise invalid(name, f"its value is {texts[name]!r}; set it to true or false.")
    return value == "true"


def _number(texts: Mapping[str, str], name: str) -> int | None:
    if (text := texts.get(name)) is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        also = f", or one of {STATE}, {EARLIEST}, {LATEST}" if name == "startingVersion" else ""
        if text.startswith("-") and text[1:].isdecimal():
            raise InvalidStateStoreArgument(
                f"[{INVALID}.IS_NEGATIVE] Invalid value for source option '{name}': it is {text}, and cannot be "
                "negative."
            )
        raise invalid(name, f"it is {text!r}, and must be a number from 0 on{also}.")
    return int(text)


def invalid(name: str, message: str) -> InvalidStateStoreArgument:
    """Return the error for an option's value, with the name of Spark's condition."""
    return InvalidStateStoreArgument(f"[{INVALID}.WITH_MESSAGE] Invalid value for source option '{name}': {message}")


def _conflict(first: str, second: str, why: str) -> InvalidStateStoreArgument:
    return InvalidStateStoreArgument(
        f"[{CONFLICT}] The options '{first}', '{second}' cannot be specified together. {why}: leave one of them out."
    )


def source_of(options: SourceOptions) -> StateSource:
    """Return the rows, or the changes, that the options of a table name.

    Raises what ``state_batches`` and ``state_changes_batches`` raise at the beginning, ``VersionNotFoundError`` and
    ``InvalidStateStoreArgument`` with the names of Spark's conditions.
    """
    options.refuse(OF_STREAMS, "A table")
    with _explained(options):
        return _changes_of(options) if options.is_changes else _rows_of(options)


@contextmanager
def _explained(options: SourceOptions) -> Iterator[None]:
    """Put the names of Spark's conditions before errors about versions, operators and state variables."""
    try:
        yield
    except VersionNotFoundError as error:
        raise VersionNotFoundError(f"[{UNAVAILABLE}] {error}") from error
    except InvalidStateStoreArgument as error:
        if str(error).startswith("["):
            raise
        versions = StateVersions.look(options.place)
        operators = versions.operators(versions.resolve(options.version))
        if options.operator not in operators:
            raise invalid("operator", str(error)) from error
        variables = [variable.name for variable in versions.schema(operators[options.operator]).in_use]
        if options.state is None:
            raise InvalidStateStoreArgument(
                f"[{REQUIRED}] 'stateVarName' must be specified: operator {options.operator!r} has the state variables "
                f"{', '.join(map(repr, variables))}."
            ) from error
        name = "readRegisteredTimers" if options.state == TIMERS else "stateVarName"
        raise invalid(name, str(error)) from error


def _rows_of(options: SourceOptions) -> StateSource:
    place, operator, state, raw = options.place, options.operator, options.state, options.state_columns
    source = state_source(place, operator, state, options.version, collect=not options.flatten, raw=raw, at=options.at)
    if options.snapshot is None:
        return source
    if options.snapshot >= source.reading.version:
        raise invalid(
            "snapshotStartBatchId",
            f"it is {options.snapshot}, and must be less than or equal to {source.reading.version - 1}, the batch that "
            "is read.",
        )
    pieces = tuple(_from_snapshot(piece, options.snapshot + 1) for piece in source.reading.pieces)
    return replace(source, reading=replace(source.reading, pieces=pieces))


def _changes_of(options: SourceOptions) -> StateSource:
    if "changeStartBatchId" not in options.given:
        raise InvalidStateStoreArgument(f"[{REQUIRED}] 'changeStartBatchId' must be specified for a table of changes.")
    first, last = options.first_batch, options.last_batch
    newest = StateVersions.look(options.place).resolve(None) - 1
    if first > (newest if last is None else last):
        end = f"the last batch is {newest}" if last is None else f"changeEndBatchId is {last}"
        raise invalid(
            "changeStartBatchId",
            f"it is {first}, and {end}. Read up to a batch that is there; a stream of changes "
            "(spark.readStream) waits for batches that are not.",
        )
    to_version = None if last is None else last + 1
    return changes_source(options.place, options.operator, options.state, first, to_version, raw=options.state_columns)


def source_schema(options: SourceOptions) -> pa.Schema:
    """Return the columns of a table or a stream: of rows, or with ``readChangeFeed`` of changes."""
    if options.is_changes:
        with _explained(options):
            newest = StateVersions.look(options.place).resolve(None)
            of, raw = options, options.state_columns
            return changes_source(of.place, of.operator, of.state, newest, newest, raw=raw).schema
    return source_of(options).schema


def _from_snapshot(piece: Piece, version: int) -> Piece:
    """Return the piece with no snapshots after ``version``. Raises ``InvalidStateStoreArgument``."""
    whole = piece.lineage
    kept = tuple(ref for ref in whole.snapshots if ref.version <= version)
    base = max((ref.version for ref in kept), default=0)
    behind = [ref.version for ref in whole.changelogs if ref.version > base]
    if len(behind) != whole.version - base and whole.rescaled is None:
        batches = ", ".join(str(ref.version - 1) for ref in whole.snapshots) or "none"
        raise invalid(
            "snapshotStartBatchId",
            f"it is {version - 1}, but partition {piece.partition} cannot be made of a snapshot of that batch or an "
            f"earlier one; there are snapshots of the batches {batches}.",
        )
    lineage = Lineage(whole.version, whole.changelogs, kept, whole.rescaled)
    return structs.replace(piece, lineage=lineage)
