"""A state task's way to its partition: find the owner, read, commit, and go on when a host dies.

A PySpark worker does not join Ray: it knows host addresses from Spark's local properties, and
looks into the node's Ray session directory when those do not answer any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa

from coordinator_actor.exceptions import BatchHeldError, StaleOwnerError, UnknownHostError, UnknownRunError
from coordinator_actor.messages import Acknowledged
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError
from spark_bridge.flight_client import HostClient, client_for, forget_client
from spark_bridge.protocol import CommitCommand, GetCommand, HostFile, TaskIdentity

RETRIABLE = (HostUnavailableError, NotOwnerError, StaleOwnerError, UnknownHostError, UnknownRunError)
RETRY_DELAY = 0.1
HELD_DELAY = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoints:
    """Where a task may find hosts. ``host_files`` is the directory in which hosts leave their addresses."""

    addresses: tuple[str, ...]
    token: str
    host_files: str
    timeout: float

    def candidates(self) -> list[tuple[str, str]]:
        """Addresses and tokens to try: those found on this node are newer than those known at query start."""
        found = read_host_files(Path(self.host_files))
        known = [(a, self.token) for a in self.addresses]
        return list(dict.fromkeys([*((f.address, f.token) for f in found), *known]))


def read_host_files(directory: Path) -> list[HostFile]:
    """The hosts that have left their address in a directory; unreadable or foreign files are an error."""
    files = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            files.append(msgspec.json.decode(path.read_bytes(), type=HostFile))
        except FileNotFoundError:
            continue  # the host went away between the listing and the read
    return files


_owners: dict[tuple[str, str, int], tuple[str, str]] = {}
"""Owner (address, token) by run id, operator and partition: this worker's cache of locations."""


class TaskStore:
    """The store of one state task: opened at version = batch id, committed once.

    Each call waits for a new owner, at most ``endpoints.timeout`` seconds, and then goes on
    (DESIGN, rule 7); after that it raises ``HostUnavailableError`` naming the last failure.
    """

    def __init__(self, task: TaskIdentity, endpoints: Endpoints) -> None:
        self._task = task
        self._endpoints = endpoints
        self._key = (task.run_id, task.operator, task.partition)
        self._owner: HostClient | None = None
        self._owner_token = endpoints.token

    def open(self) -> None:
        """Open the store at its owner."""
        self._with_owner(lambda owner: None)

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Values of keys at the version opened."""
        task = self._task
        command = GetCommand(task.run_id, task.operator, task.partition, task.batch_id)
        return self._with_owner(lambda owner: owner.get_many(command, keys))

    def commit(self, changes: pa.RecordBatch, timings: dict[str, float]) -> Acknowledged:
        """Commit; returns when the changes are durable and accepted."""
        return self._with_owner(lambda owner: owner.commit(CommitCommand(self._task, timings), changes))

    def _with_owner(self, call: Callable[[HostClient], T]) -> T:
        deadline = time.monotonic() + self._endpoints.timeout
        while True:
            try:
                if self._owner is None:
                    self._owner = self._find_owner()
                return call(self._owner)
            except BatchHeldError:
                # The query stops with a savepoint, and this task with it; or it goes on if that fails.
                time.sleep(HELD_DELAY)
                deadline = time.monotonic() + self._endpoints.timeout
            except RETRIABLE as error:
                self._forget_owner(error)
                if time.monotonic() > deadline:
                    raise HostUnavailableError(
                        f"Partition {self._task.partition} of operator {self._task.operator!r} found no owner within "
                        f"{self._endpoints.timeout:.0f} s (spark.statestore.recoveryTimeout); last failure: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                time.sleep(RETRY_DELAY)

    def _forget_owner(self, error: Exception) -> None:
        if self._owner is not None and isinstance(error, HostUnavailableError):
            forget_client(self._owner.address, self._owner_token)
        self._owner = None
        _owners.pop(self._key, None)

    def _find_owner(self) -> HostClient:
        cached = _owners.get(self._key)
        candidates = self._endpoints.candidates() if cached is None else [cached]
        failure: Exception = HostUnavailableError(
            f"no state store host is known; looked into {self._endpoints.host_files}"
        )
        for address, token in candidates:
            host = client_for(address, token)
            try:
                opened = host.open(self._task)
                if opened.redirect is not None:
                    address = opened.redirect  # noqa: PLW2901 - the owner replaces the host asked
                    host = client_for(address, token)
                    if (again := host.open(self._task)).redirect is not None:
                        raise NotOwnerError(f"{address} sent the task on to {again.redirect}; ownership is changing.")
            except HostUnavailableError as error:
                forget_client(address, token)
                failure = error
                continue
            _owners[self._key] = (address, token)
            self._owner_token = token
            return host
        raise failure
