"""The engine that a configuration names. Hosts and readers need the engine only, and no provider."""

from __future__ import annotations

from dataclasses import dataclass

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.exceptions import InvalidStateStoreArgument


@dataclass(frozen=True)
class BackendEngine:
    """The name of a backend, as snapshots record it, and its engine.

    ``opens_slowly``: to open the engine for writing takes so long that a host does so only once it has something to
    write (``DeferredEngine``).
    """

    name: str
    engine: type[StateEngine]
    opens_slowly: bool


def backend_of(conf: StateStoreConf) -> BackendEngine:
    """Return the name and the engine of the provider that ``conf`` names.

    Raises ``InvalidStateStoreArgument`` if the provider has no engine.
    """
    found = conf.provider_class()
    name, engine = getattr(found, "backend", None), getattr(found, "engine", None)
    if not isinstance(name, str) or not isinstance(engine, type):
        raise InvalidStateStoreArgument(
            f"provider={conf.provider!r} names {found.__name__}, which is no LocalStateStoreProvider: a host needs its "
            "engine."
        )
    return BackendEngine(name, engine, bool(getattr(found, "opens_slowly", False)))
