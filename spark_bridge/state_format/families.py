"""The names of the column families that operators keep state in; ``layouts`` has the columns that stand in them.

A variable of a processor is in the family of its own name. Lists, maps and timers are in further families, whose names
are the variable's with a part behind it. Clients and hosts import this module: it must not import Spark or pandas,
whose import would delay their start.
"""

from __future__ import annotations

from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema

PART_SEPARATOR = ".-"
"""Begins every part, and stands in no name of a state variable."""
CHUNKS = ".-chunks"
"""The part of a list that has all elements but the last ones."""
ENTRIES = ".-entries"
"""The part of a map that has the entries of large maps."""
TIMERS_BY_KEY = ".-keys"
"""The part of the timers that has the timers of each grouping key."""
TIMERS_BY_EXPIRY = ".-expiry"
"""The part of the timers that has all timers by the time when they fire."""
ENDS_FAMILY = "sessions.-ends"
"""The family of ``aggregate`` with session windows that has the keys by the time at which they are due."""
EXPIRY_FAMILY = "default.-expiry"
"""The family of ``deduplicate`` that has the keys by the time at which they expire."""

SWEEP_FAMILY = "ttl.-sweep"
"""The family that notes, by key group and family, up to which key the sweep of expired values has come.

It is in no schema, for its rows are no state: a key is the key group (2 bytes) and the family's name in UTF-8, a value
is a stored key. A savepoint leaves them out, and the next sweep begins a key group again.
"""


def family_of(variable: StateVariable, part: str = "") -> tuple[str, StateSchema]:
    """Return the name and the schema of a variable's family; ``part`` is ``CHUNKS``, ..., or "" for the main family.

    A variable that was deleted and declared again is in families of other names: only this function finds these names.
    """
    family = variable.family(variable.name + part)
    return family, variable.families[family]
