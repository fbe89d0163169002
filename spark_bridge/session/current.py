"""The state store session of this process: one at a time, from ``init_spark`` or ``attach`` to ``stop_spark``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_bridge.exceptions import SessionError

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
