"""Names of columns: the reserved prefix, and the rule by which columns that stand beside each other get other names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RESERVED_PREFIX = "__statestore_"
"""Begins the names of columns that the state store adds; no column of a user's may have such a name."""
VALUE_SUFFIX = "__value"
"""Appended to the name of a column whose name a column before it has, such as a value's column named as a key's."""


def distinct_names(names: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """Return the names, each with ``__value`` appended until no name before it and none of ``taken`` is the same.

    Upper and lower case count as equal, as they do in SQL. A name that is free as it is stays, whatever gets a suffix
    before it.
    """
    own = {name.casefold() for name in names}
    used = {name.casefold() for name in taken}
    result = []
    for given in names:
        name = given
        while name.casefold() in used or (name != given and name.casefold() in own):
            name += VALUE_SUFFIX
        used.add(name.casefold())
        result.append(name)
    return result
