"""The column families that a state variable is kept in, by its name; see ``stateful/variables.py`` for what is in them.

Apart from that file, for hosts read these families and do without Spark and pandas, whose import would delay their restart.
"""

from __future__ import annotations

from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema

TTL_COLUMN = "__ttl_expiration_ms"
CHUNKS = ".-chunks"
ENTRIES = ".-entries"
TIMERS_BY_KEY = ".-keys"
TIMERS_BY_EXPIRY = ".-expiry"


def family_of(variable: StateVariable, part: str = "") -> tuple[str, StateSchema]:
    """A variable's family by its part (``CHUNKS``, ...; "" for the one of its own name), and the family's schema.

    A variable that was deleted and declared again is in families of other names.
    """
    family = variable.family(variable.name + part)
    return family, variable.families[family]
