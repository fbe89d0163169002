"""The names of the column families that operators keep state in; ``layouts`` has the columns that stand in them.

A variable of a processor is in the family of its own name, or of ``stored_name`` where no file can have such a name.
Lists, maps and timers are in further families, whose names have a part after that. Clients and hosts import this
module: it must not import Spark or pandas, whose import would delay their start.
"""

from __future__ import annotations

import re

from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema

PART_SEPARATOR = ".-"
"""Begins every part, and stands in no name of a family that is a variable's own, unless ``stored_name`` made it."""
_ESCAPED = "n.-"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LETTER = re.compile(r"[A-Za-z0-9_]")
CHUNKS = ".-chunks"
"""The part of a list that has all elements but the last ones."""
CHUNKS_BY_TIME = ".-due"
"""The part of a side of ``join`` that has its chunks by the time at which their first row is due."""
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


def stored_name(variable: str) -> str:
    """Return the name of the main family of a variable: that of the variable, or ASCII that says it.

    The latter is ``n.-`` and the name in UTF-8, where every byte but letters, digits and ``_`` is ``-`` and two
    hexadecimal digits. No other family is called so: a name with ``.-`` in it is not kept as it is, and after the
    ``.-`` of a part stands no other ``-``.
    """
    if _PLAIN.fullmatch(variable) and PART_SEPARATOR not in variable:
        return variable
    return _ESCAPED + "".join(chr(b) if _LETTER.fullmatch(chr(b)) else f"-{b:02x}" for b in variable.encode())


def family_of(variable: StateVariable, part: str = "") -> tuple[str, StateSchema]:
    """Return the name and the schema of a variable's family; ``part`` is ``CHUNKS``, ..., or "" for the main family.

    A variable that was deleted and declared again is in families of other names: only this function finds these names.
    """
    family = variable.family(stored_name(variable.name) + part)
    return family, variable.families[family]
