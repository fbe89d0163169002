"""The state store session of this process: one at a time, from ``init_spark`` or ``attach`` to ``stop_spark``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_bridge.exceptions import SessionError
from spark_bridge.session.settings import STATE_LOCATION_CONF, storage_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_bridge.session.state_cluster import StateCluster


@dataclass(frozen=True)
class Session:
    """A Spark session that is joined to a state cluster; ``stop`` ends all that was started for it."""

    spark: SparkSession
    cluster: StateCluster
    stop: Callable[[], None]


_current: Session | None = None


def begin_session(session: Session) -> None:
    """Make ``session`` this process's session."""
    global _current
    _current = session


def end_session() -> Session | None:
    """Return this process's session, which it has no more from now on; None if there was none."""
    global _current
    session, _current = _current, None
    return session


def require_no_session() -> None:
    """Raise ``SessionError`` if this process has a session."""
    if _current is not None:
        raise SessionError("This process has a state store session already; call stop_spark() before another one.")


def current_cluster() -> StateCluster:
    """Return the state cluster of this process's session. Raises ``SessionError`` if there is none."""
    if _current is None:
        raise SessionError("This process has no state store session; call init_spark or attach first.")
    return _current.cluster


def current_spark() -> SparkSession | None:
    """Return the Spark session of this process's session; None if there is none."""
    return None if _current is None else _current.spark


def session_options(storage_options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage settings of the Spark session, if there is one, with those that were given."""
    spark = current_spark()
    return {**({} if spark is None else storage_settings(spark)), **(storage_options or {})}


def session_state_location() -> str | None:
    """Return ``spark.statestore.location`` of the Spark session, if there is a session with that setting."""
    spark = current_spark()
    return (spark.conf.get(STATE_LOCATION_CONF, "") or None) if spark is not None else None
