"""Which engine a configuration names, for hosts and readers, which keep manifests of their own and need no provider."""

from __future__ import annotations

from dataclasses import dataclass

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.exceptions import InvalidStateStoreArgument


@dataclass(frozen=True)
class Backend:
    """The name of a backend, as snapshots record it, and its engine."""

    name: str
    engine: type[StateEngine]


def backend_of(conf: StateStoreConf) -> Backend:
    """Return the backend of the provider that ``conf`` names; raises ``InvalidStateStoreArgument`` if that has no engine."""
    found = conf.provider_class()
    name, engine = getattr(found, "backend", None), getattr(found, "engine", None)
    if not isinstance(name, str) or not isinstance(engine, type):
        raise InvalidStateStoreArgument(
            f"provider={conf.provider!r} names {found.__name__}, which is no LocalStateStoreProvider: a host needs its engine."
        )
    return Backend(name, engine)
