"""The shapes of the messages between the processes of a cluster, one line per message or record.

``python -m tests.spark_bridge.session.message_shapes`` rewrites the file of this version.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from coordinator_actor.coordinator_port import MESSAGES, CoordinatorPort
from coordinator_actor.messages import WIRE_VERSION
from spark_bridge.host_actor import SessionOptions
from spark_bridge.task import executor
from spark_bridge.transport import protocol

FIXTURE = Path(__file__).parents[2] / "fixtures" / f"messages-{WIRE_VERSION}.txt"
OURS = ("backends.", "coordinator_actor.", "spark_bridge.")
COMMAND = "python -m tests.spark_bridge.session.message_shapes"


def shapes() -> list[str]:
    """Return the messages to the coordinator, the properties that tasks receive, and all records, in a fixed order."""
    messages = [f"{name}{_parameters(getattr(CoordinatorPort, name))}" for name in sorted(MESSAGES)]
    told = {name: value for name, value in vars(executor).items() if name.isupper() and name != "TYPE_CHECKING"}
    schemas = {name: value for name, value in vars(protocol).items() if name.endswith("_SCHEMA")}
    columns = [f"{name} {[f'{f.name} {f.type}' for f in schema]}" for name, schema in sorted(schemas.items())]
    records = [f"{record.__module__}.{record.__name__}{_parameters(record)}" for record in _records()]
    return [*messages, *(f"{name} = {value}" for name, value in sorted(told.items())), *columns, *sorted(records)]


def _records() -> set[type]:
    """Return the records of the project that a message has, directly or within another record."""
    hints: list[object] = [SessionOptions]
    for name in MESSAGES:
        hints.extend(typing.get_type_hints(getattr(CoordinatorPort, name)).values())
    hints.extend(c for c in vars(protocol).values() if isinstance(c, type) and c.__module__ == protocol.__name__)
    found: set[type] = set()
    while hints:
        for kind in _classes(hints.pop()):
            if kind not in found and kind.__module__.startswith(OURS) and _is_record(kind):
                found.add(kind)
                hints.extend(typing.get_type_hints(kind).values())
    return found


def _classes(hint: object) -> Iterator[type]:
    """Yield the classes in a type such as ``dict[str, tuple[HostInfo, ...]]``."""
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _is_record(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)


def _parameters(of: object) -> str:
    """Return the names, types and order of parameters or fields; of defaults only that there is one."""
    assert callable(of)
    hints = getattr(of, "__annotations__", {})
    said = []
    for parameter in inspect.signature(of).parameters.values():
        star = "*, " if parameter.kind is parameter.KEYWORD_ONLY else ""
        default = "" if parameter.default is parameter.empty else " = ..."
        said.append(f"{star}{parameter.name}: {hints.get(parameter.name, '')}{default}")
    answer = f" -> {hints['return']}" if "return" in hints else ""
    return f"({', '.join(said)}){answer}"


if __name__ == "__main__":
    FIXTURE.write_text("\n".join(shapes()) + "\n")
