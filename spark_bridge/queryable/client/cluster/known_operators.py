"""The operators that a client knows: used until their location proves wrong, and refreshed in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import OperatorLocation
from spark_bridge.queryable.client.answers.state_views import StateView, state_view

log = logging.getLogger(__name__)

REFRESH_SECONDS = 3.0
"""A location in use is looked up again at this age."""
OperatorRef = tuple[str, str | None]
"""Operator and query, as a caller names them."""


@dataclass
class KnownOperator:
    """The location of an operator, and its state variables.

    ``window_us`` is the length of its windows in us by state variable, once known.
    """

    location: OperatorLocation
    schema: OperatorSchema
    located_at: float
    views: dict[str | None, StateView] = field(default_factory=dict)
    window_us: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, location: OperatorLocation, located_at: float, earlier: KnownOperator | None) -> KnownOperator:
        """Return the operator that a location describes.

        Views are kept from ``earlier`` if the operator is still the same.
        """
        if earlier is not None and _is_same(location, earlier.location):
            # Another run may have windows of another length.
            window_us = earlier.window_us if location.run_id == earlier.location.run_id else {}
            return cls(location, earlier.schema, located_at, earlier.views, window_us)
        return cls(location, OperatorSchema.from_json(location.operator.schema), located_at)

    def view(self, state: str | None) -> StateView:
        """Return a state variable. Raises ``UnknownKvStateIdError``."""
        found = self.views.get(state)
        if found is None:
            found = state_view(self.location.operator.name, self.schema, self.location.key_groups, state)
            self.views[state] = found
        return found


def _is_same(one: OperatorLocation, other: OperatorLocation) -> bool:
    return (one.operator.schema, one.operator.name, one.key_groups) == (
        other.operator.schema,
        other.operator.name,
        other.key_groups,
    )


class KnownOperators:
    """Known operators by name and query, for any number of threads.

    It holds no lock, and no thread between refreshes, so a process may fork.
    """

    def __init__(
        self, locate: Callable[[str, str | None, float], OperatorLocation], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._locate = locate
        self._clock = clock
        self._known: dict[OperatorRef, KnownOperator] = {}
        self._last: dict[OperatorRef, KnownOperator] = {}

    def had_answer(self, ref: OperatorRef) -> bool:
        """Return whether the operator has been located before."""
        return ref in self._last

    def get(self, ref: OperatorRef, deadline: float) -> KnownOperator:
        """Return the known operator of that name; look it up if none is known."""
        known = self._known.get(ref)
        if known is None:
            return self._look_up(ref, deadline)
        if self._clock() - known.located_at > REFRESH_SECONDS:
            self._refresh(ref, known)
        return known

    def forget(self, ref: OperatorRef) -> None:
        """Forget a location that has proved wrong."""
        self._known.pop(ref, None)

    def _look_up(self, ref: OperatorRef, deadline: float) -> KnownOperator:
        location = self._locate(*ref, deadline)
        known = KnownOperator.of(location, self._clock(), self._last.get(ref))
        self._known[ref] = self._last[ref] = known
        return known

    def _refresh(self, ref: OperatorRef, known: KnownOperator) -> None:
        # Set before the look-up, so that other threads use the location meanwhile. Two threads at once look it up
        # twice.
        known.located_at = self._clock()

        def refresh() -> None:
            try:
                self._look_up(ref, self._clock() + REFRESH_SECONDS)
            except Exception as error:  # noqa: BLE001 - a request with a wrong location finds that out by itself
                log.debug("The location of %s could not be refreshed: %s", ref, error)

        threading.Thread(target=refresh, name="statestore-locate", daemon=True).start()
