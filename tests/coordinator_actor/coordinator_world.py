"""A coordinator with a clock, a Spark checkpoint and storage of the test's own; batches of such a ``World``, and what
tests ask of a coordinator that no message asks.

``HangingStorage`` hangs for one query, for as long as a test likes.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from backends.encoding.schema import StateSchema
from backends.formats.changelog import ChangelogMeta, Changes, GroupMember, group_path, write_changelog, write_group
from backends.formats.manifest import Manifest, changelog_path, unseal
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.fencing import FENCE
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    CommitFigures,
    HostInfo,
    HostReport,
    OpenBatch,
    OpenGrant,
    OperatorSpec,
    QueryRegistration,
    Refused,
)
from coordinator_actor.run.query_state import QueryState
from spark_bridge.exceptions import rebuilt_error
from tests.patience import HANG, PATIENCE


def run_of(coordinator: Coordinator, run_id: str = "run1") -> QueryState:
    """A registered run."""
    return coordinator.registries.runs.by_id[run_id]


def acknowledge(coordinator: Coordinator, message: Acknowledge) -> Acknowledged:
    """One acknowledgement by itself; raises the error that refuses it."""
    (answer,) = coordinator.acknowledge_many(message.run_id, message.host_id, message.incarnation, (message,))
    if isinstance(answer, Refused):
        raise rebuilt_error(answer.error, answer.message)
    return answer


SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])).to_json()


@dataclass
class World:
    """One checkpoint directory, hosts that answer at once, and any number of coordinators.

    Without ``is_local`` the directory is taken for one of an object store.
    """

    root: Path
    now: float = 1000.0
    put_hook: Callable[[str], None] | None = None
    is_local: bool = True
    exists_hook: Callable[[str], None] | None = None
    pending: dict[tuple[str, int], Acknowledge] = field(default_factory=dict)

    def storage(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = CheckpointStorage.open(location, options, fsync=False)
        storage.is_local = self.is_local
        put_new = storage.put_new

        def put(path: str, data: bytes) -> Any:
            if self.put_hook is not None:
                self.put_hook(path)
            return put_new(path, data)

        exists = storage.exists

        def look(path: str) -> bool:
            if self.exists_hook is not None:
                self.exists_hook(path)
            return exists(path)

        storage.put_new = put  # type: ignore[method-assign]
        storage.exists = look  # type: ignore[method-assign]
        return storage

    def coordinator(self, hosts: int = 2) -> Coordinator:
        # Told at once whatever it must know, so that it need not wait for reports.
        made = Coordinator(lambda: self.now, self.storage, CoordinatorConf(report_timeout=0.0))
        for i in range(hosts):
            made.register_host(self.host(i), HostReport())
        return made

    @staticmethod
    def host(i: int, incarnation: str = "a") -> HostInfo:
        return HostInfo(f"h{i}", incarnation, f"grpc://127.0.0.1:{i}", f"node{i}", "s")

    def registration(self, run: str = "run1", n: int = 2, **changes: Any) -> QueryRegistration:
        given = QueryRegistration(
            query_id="q",
            run_id=run,
            name="name",
            session_id="s",
            checkpoint_location=str(self.root / "ck"),
            state_location=str(self.root / "ck/statestore"),
            operators=(OperatorSpec("op", n, SCHEMA),),
        )
        return msgspec.structs.replace(given, **changes)

    def commit_spark(self, batch: int, checkpoint: str = "ck") -> None:
        path = self.root / checkpoint / "commits" / str(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1\n{}")

    def plan_spark(self, batch: int, checkpoint: str = "ck") -> None:
        path = self.root / checkpoint / "offsets" / str(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1\n{}\n{}")

    def open(self, c: Coordinator, batch: int, partition: int = 0, run: str = "run1", host: int = 0) -> OpenGrant:
        info = self.host(host)
        grant = c.open_batch(OpenBatch(run, batch, info.host_id, info.incarnation))
        owner = grant.hosts[grant.owners["op"][partition]]
        if owner != info:
            grant = c.open_batch(OpenBatch(run, batch, owner.host_id, owner.incarnation))
        head = grant.heads["op"].get(partition)
        return OpenGrant(owner, grant.version, head, grant.registration, grant.epoch)

    def open_owner(self, c: Coordinator, partition: int, run: str = "run1") -> HostInfo:
        return c.open_for_read(run, "op", partition).owner

    def stage(self, grant: OpenGrant, partition: int, batch: int, attempt: str, run: str = "run1") -> Acknowledge:
        """Write the changelog durably and return the acknowledgement, as a host does."""
        member = self._member(grant, partition, batch, attempt, run)
        ref = self.storage(grant.registration.state_location, {}).put_new(member.path, member.data)
        return self._message(grant, member.meta, ref)

    def stage_group(self, grants: Mapping[int, OpenGrant], batch: int, attempt: str, run: str) -> list[Acknowledge]:
        """The same with the changelogs of several partitions in one object."""
        members = [self._member(grant, p, batch, attempt, run) for p, grant in grants.items()]
        path = group_path(batch + 1)
        data, refs = write_group(path, members)
        self.storage(next(iter(grants.values())).registration.state_location, {}).put_new(path, data)
        return [
            self._message(grant, member.meta, ref)
            for grant, member, ref in zip(grants.values(), members, refs, strict=True)
        ]

    @staticmethod
    def _member(grant: OpenGrant, partition: int, batch: int, attempt: str, run: str) -> GroupMember:
        n = grant.registration.operators[0].num_partitions
        meta = ChangelogMeta(run, "op", partition, n, batch + 1, attempt, grant.head)
        data = write_changelog(Changes.of(pa.array([b"k"]), pa.array([attempt.encode()])), meta)
        return GroupMember(meta, changelog_path("op", n, partition, "default", batch + 1, uuid.uuid4().hex), data)

    @staticmethod
    def _message(grant: OpenGrant, meta: ChangelogMeta, file: FileRef) -> Acknowledge:
        owner, run, p = grant.owner, meta.query_run_id, meta.partition
        return Acknowledge(run, "op", p, meta.version, meta.attempt, owner.host_id, owner.incarnation, file, grant.head)

    def run_batch(self, c: Coordinator, batch: int, n: int = 2, run: str = "run1", attempt: str = "t") -> list[Any]:
        answers = []
        for p in range(n):
            answers.append(acknowledge(c, self.stage(self.open(c, batch, p, run), p, batch, attempt, run)))
        self.commit_spark(batch)
        return answers

    def run_grouped_batch(self, c: Coordinator, batch: int, n: int = 2, run: str = "run1", attempt: str = "t") -> None:
        """A batch whose changelogs are all in one object."""
        for message in self.stage_group({p: self.open(c, batch, p, run) for p in range(n)}, batch, attempt, run):
            acknowledge(c, message)
        self.commit_spark(batch)

    def manifests(self) -> list[dict[str, Any]]:
        """Return the stored manifests, with an entry for each partition instead of columns."""
        return self.manifests_of("ck")

    def manifests_of(self, checkpoint: str) -> list[dict[str, Any]]:
        """Return the manifests stored below a checkpoint directory of this name."""
        paths = sorted((self.root / checkpoint / "statestore/manifests").glob("*.json"))
        found = [unseal(data, Manifest, p.name) for p in paths if (data := p.read_bytes()) != FENCE]
        return [json.loads(msgspec.json.encode(manifest, enc_hook=dict)) for manifest in found]


CALLS = ("put_new", "get", "exists", "list", "delete")


class HangingStorage:
    """Opens real storage. While ``hangs(location)`` lasts, no call to files below that location comes back."""

    def __init__(self, open_storage: OpenStorage) -> None:
        self._open_storage = open_storage
        self._location: str | None = None
        self._goes_on = threading.Event()
        self._waiting = threading.Semaphore(0)

    def open(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = self._open_storage(location, options)
        for name in CALLS:
            setattr(storage, name, self._gated(location, getattr(storage, name)))
        return storage

    def _gated(self, location: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            if self._location is not None and location.startswith(self._location):
                self._waiting.release()
                assert self._goes_on.wait(HANG), "the storage was never released"
            return call(*args, **kwargs)

        return gated

    @contextmanager
    def hangs(self, location: str) -> Iterator[None]:
        """Storage below a location hangs until the end of the block."""
        self._goes_on.clear()
        self._location = location
        try:
            yield
        finally:
            self._location = None
            self._goes_on.set()

    def wait_for_call(self) -> None:
        """Wait until one more call hangs."""
        assert self._waiting.acquire(timeout=PATIENCE), "the storage got no call"


def begin(world: World, run: str = "run1", **changes: Any) -> Coordinator:
    c = world.coordinator()
    answer = c.register_query(world.registration(run, **changes))
    assert answer.refusal is None, answer.refusal
    return c


def staged(world: World, c: Coordinator, batch: int, p: int, figures: CommitFigures, run: str = "run1") -> Acknowledge:
    return msgspec.structs.replace(world.stage(world.open(c, batch, p, run), p, batch, "t", run), figures=figures)


def batches(world: World, c: Coordinator, first: int, last: int, run: str = "run1") -> None:
    for batch in range(first, last + 1):
        world.plan_spark(batch)
        world.run_batch(c, batch, run=run)
        c.batch_committed(run, batch)
