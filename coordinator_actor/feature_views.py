"""Feature views as users declare them: columns of operators with one key, which a model reads in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from backends.conf import SECOND, parse_duration
from coordinator_actor.exceptions import InvalidRequestError

Default: TypeAlias = str | int | float | bool | None


class Feature(Struct, frozen=True):
    """One column of a feature view: a column of an operator's state.

    ``column`` is by default the one with the feature's ``name``. ``default`` replaces nulls and the values of keys
    without state. It is a number, a string or a boolean of the column's type. ``query`` and ``state`` are needed as in
    ``QueryableStateClient.get``: if several queries have the operator, or if it has several state variables.
    """

    name: str
    operator: str
    column: str | None = None
    default: Default = None
    query: str | None = None
    state: str | None = None

    @property
    def source(self) -> tuple[str, str | None]:
        """Return the operator and its query, as ``locate`` takes them."""
        return self.operator, self.query


class FeatureView(Struct, frozen=True):
    """Named columns of one or several operators with the same key, for the requests of a model.

        FeatureView(
            "card_fraud",
            entity="card",
            features=[Feature("n", "card_totals", default=0), Feature("country", "card_profile")],
            owner="fraud@example.com",
            description="What the fraud model knows of a card.",
            max_age="5 minutes",
        )

    ``entity``: the key column of the operators, or several in the order of their ``by``. ``max_age``: how old the
    version that answers may be, such as ``"90 seconds"`` or ``"1 hour 30 minutes"``; None for no bound. ``on_stale``:
    an older version is an error, or its features are null.
    """

    name: str
    entity: str | Sequence[str]
    features: Sequence[Feature]
    owner: str = ""
    description: str = ""
    max_age: str | None = None
    on_stale: Literal["error", "null"] = "error"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the columns of ``entity``."""
        return (self.entity,) if isinstance(self.entity, str) else tuple(self.entity)

    @property
    def sources(self) -> list[tuple[str, str | None]]:
        """Return each operator and its query once, in the order of the features."""
        return list(dict.fromkeys(feature.source for feature in self.features))

    @property
    def max_age_seconds(self) -> float | None:
        """Return ``max_age`` in seconds. Raises ``InvalidRequestError`` if it is not a duration above 0."""
        if self.max_age is None:
            return None
        duration = parse_duration(self.max_age)
        if duration is None:
            raise InvalidRequestError(
                f"max_age={self.max_age!r} of feature view {self.name!r} is not a duration above 0: write numbers with "
                "milliseconds, seconds, minutes, hours, days or weeks, such as '5 minutes' or '1 hour 30 minutes'."
            )
        return float(duration.us / SECOND)
