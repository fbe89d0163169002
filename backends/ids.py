"""Names: of a state store, of its loaded instances, of operators and column families, and the rules for them.

Spark has ``StateStoreId`` and ``StateStoreProviderId`` as well.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from backends.exceptions import InvalidStateStoreArgument

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can be a directory's name on every storage; raise ``InvalidStateStoreArgument`` otherwise.

    ``kind`` says in the message what the name is of, such as "a store".
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidStateStoreArgument(
            f"{name!r} cannot be the name of {kind}: use 1 to 200 letters of a to z or A to Z, digits, '_', "
            "'-' or '.', not starting with '.' or '-'."
        )
    return name


@dataclass(frozen=True)
class StateStoreId:
    """A partition of an operator's state, below a checkpoint location."""

    checkpoint_location: str
    operator_id: str
    partition_id: int
    store_name: str = "default"

    def __post_init__(self) -> None:
        if not self.checkpoint_location:
            raise InvalidStateStoreArgument("checkpoint_location is empty: give the directory to keep the state in.")
        check_name("an operator", self.operator_id)
        check_name("a store", self.store_name)
        if isinstance(self.partition_id, bool) or not isinstance(self.partition_id, int) or self.partition_id < 0:
            raise InvalidStateStoreArgument(f"partition_id must be an int of 0 or more, not {self.partition_id!r}.")

    def __str__(self) -> str:
        return (
            f"StateStoreId[location={self.checkpoint_location}, operator={self.operator_id}, "
            f"partition={self.partition_id}, store={self.store_name}]"
        )


@dataclass(frozen=True)
class StateStoreProviderId:
    """A store as it is loaded for one run of a query. A restarted query never meets its older instances.

    ``query_run_id`` may be given as a ``uuid.UUID``, and is its text then.
    """

    store_id: StateStoreId
    query_run_id: str

    def __post_init__(self) -> None:
        given: object = self.query_run_id
        if isinstance(given, uuid.UUID):
            object.__setattr__(self, "query_run_id", str(given))
        elif not isinstance(given, str):
            raise InvalidStateStoreArgument(f"query_run_id must be a text or a uuid.UUID, not {given!r}.")

    def __str__(self) -> str:
        return f"StateStoreProviderId[{self.store_id}, queryRunId={self.query_run_id}]"


DEFAULT_FAMILY = "default"
"""The column family of a store that has no other."""
