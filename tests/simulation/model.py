"""A model of the state that checks the guarantees from outside.

Every planned batch is a ``Plan``: which keys it touches, and what their values are afterwards. A value is a
digest of the value before and of the plan, so that rows lost, counted twice, or applied to another state show at once.
A stored value contains its attempt: of several attempts, only that of the one that the manifest names may be seen.

A streaming query over all its runs: where its files are, how it is laid out, and what its state must be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats import manifest_chain as chains
from backends.formats.changelog import ChangelogMeta, GroupIndex, read_changelog
from backends.formats.manifest import Lineage, Manifest, PartitionEntry, SnapshotRef, unseal, version_in
from backends.formats.manifest_chain import Layout, layout_of
from backends.formats.snapshot import SnapshotDescriptor
from backends.storage.locations import digest
from coordinator_actor.durable.manifests import RewrittenFiles, manifest_path
from coordinator_actor.messages import Acknowledge
from tests.simulation.scheduler import Violation
from tests.simulation.sometimes import sometimes
from tests.simulation.storage import content_of

KEY_GROUPS = 16
DIGEST = 8
"""Bytes of a value; the attempt follows it in the store."""
HEADER = 7
"""The bytes before the only column of a stored value: three for nulls, four for the length."""
SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.binary())]))
_IDS = pa.RecordBatch.from_pydict({"k": pa.array([0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 14, 17], pa.int64())})
ID_OF: dict[bytes, int] = dict(
    sorted(
        zip(encode_keys(_IDS, np.asarray(key_groups(_IDS, KEY_GROUPS))).to_pylist(), _IDS["k"].to_pylist(), strict=True)
    )
)
KEYS = tuple(ID_OF)
"""Stored keys, ascending. No two share a key group."""
_EPOCH_AND_ID = attrgetter("epoch", "id")


def partition_of(key: bytes, num_partitions: int) -> int:
    """The rule of key groups: partition p of n owns the groups g with ``g*n//G == p``."""
    return key[1] * num_partitions // KEY_GROUPS


def new_value(operator: str, token: str, key: bytes, old: bytes | None) -> bytes | None:
    """Return the value that a batch gives a key: it differs if the batch is done twice, left out or out of order."""
    made = hashlib.blake2b(b"|".join((operator.encode(), token.encode(), key, old or b"")), digest_size=DIGEST).digest()
    return None if made[0] % 8 == 0 else made


class Plan:
    """One batch as Spark has planned it, in ``offsets/<batch>``. ``values`` is the state that it leads to.

    ``forgotten`` are the keys that an exchange of files has taken out of the changes and the state of this batch.
    ``earlier`` has the values that exchanges have replaced: hosts show them until they learn of the exchange.
    """

    def __init__(self, token: str, batch: int, parent: Plan | None, operators: Collection[str]) -> None:
        self.token = token
        self.batch = batch
        self.parent = parent
        seed = hashlib.blake2b(token.encode(), digest_size=len(KEYS)).digest()
        self.keys = tuple(k for k, b in zip(KEYS, seed, strict=True) if b % 3 == 0)
        self.forgotten: set[tuple[str, bytes]] = set()
        self.earlier: dict[tuple[str, bytes], list[tuple[bytes | None, Exchange]]] = {}
        self._operators = operators
        self.values: dict[tuple[str, bytes], bytes] = {}
        self._compute()

    def _compute(self) -> None:
        self.values = dict(self.parent.values) if self.parent is not None else {}
        for operator in self._operators:
            for key in self.keys:
                value = new_value(operator, self.token, key, self.values.get((operator, key)))
                if value is None:
                    self.values.pop((operator, key), None)
                else:
                    self.values[(operator, key)] = value

    def forget(self, exchange: Exchange) -> None:
        """Lose the keys of an exchange of the files of this batch's version, or of a later one."""
        for key in exchange.keys:
            self._note(exchange, key, self.values.pop(key, None))
            if key[1] in self.keys:
                self.forgotten.add(key)

    def come_again(self) -> None:
        """Run on what an exchange has left of the state before: it was prepared, and its changes do not count."""
        self.forgotten.clear()
        self._compute()

    def follow(self, exchange: Exchange) -> None:
        """Compute the state again from that of the batch before, which an exchange has changed."""
        before_exchange = self.values
        self._compute()
        for key in exchange.keys:
            self._note(exchange, key, before_exchange.get(key))

    def _note(self, exchange: Exchange, key: tuple[str, bytes], value: bytes | None) -> None:
        self.earlier.setdefault(key, []).append((value, exchange))

    def may_be(self, key: tuple[str, bytes], value: bytes | None, since: float) -> bool:
        """Return whether a key may be seen with a value by someone who has asked at ``since``."""
        if value == self.values.get(key):
            return True
        earlier = self.earlier.get(key, ())
        return any(value == old and exchange.is_unreported(since) for old, exchange in earlier)


@dataclass
class Exchange:
    """Files were exchanged for ones without ``keys``, which are pairs of an operator and a key, at ``began``.

    ``values`` are those that the keys had, and that no file may have any more. ``reported`` is the time at which its
    caller learned that nothing is left of the keys.
    """

    path: str
    keys: frozenset[tuple[str, bytes]]
    began: float
    values: frozenset[bytes] = frozenset()
    reported: float | None = None

    def is_unreported(self, since: float) -> bool:
        """Return whether a client that asked at ``since`` may still see the forgotten values."""
        return self.reported is None or since < self.reported


def stored(value: bytes | None, attempt: str) -> bytes | None:
    """Return the bytes that a task writes for a value: a row with one column, as ``SCHEMA`` encodes it."""
    if value is None:
        return None
    content = value + attempt.encode()
    return bytes(3) + len(content).to_bytes(4, "little") + content


def value_in(content: bytes | None) -> bytes | None:
    """Return the value in stored content."""
    return None if content is None else content[HEADER : HEADER + DIGEST]


def attempt_in(content: bytes) -> str:
    """Return the attempt in stored content."""
    return content[HEADER + DIGEST :].decode()


def is_before(plan: Plan, operator: str, key: bytes, value: bytes | None) -> bool:
    """Return whether a task of the batch may read a value.

    A task whose work is wasted, because its batch is over or its coordinator replaced, may read values that were
    forgotten since. Only the changelogs that manifests name count.
    """
    return value is None if plan.parent is None else plan.parent.may_be((operator, key), value, 0.0)


def entries(manifest: Manifest) -> Iterator[tuple[str, int, PartitionEntry]]:
    """Every partition's entry."""
    for operator, held in manifest.operators.items():
        for partition in held.partitions:
            yield operator, partition, held.partitions[partition]


@dataclass
class Model:
    """Plans by the token in ``offsets/``, and by the attempts that worked on them."""

    operators: tuple[str, ...]
    plans: dict[str, Plan] = field(default_factory=dict)
    plan_of_attempt: dict[str, Plan] = field(default_factory=dict)
    committed: list[Plan] = field(default_factory=list)
    seen: dict[tuple[str, bytes], set[bytes | None]] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    records: dict[str, RewrittenFiles] = field(default_factory=dict)
    """Which files have replaced others, by the paths of the records."""
    to_forget: dict[str, frozenset[tuple[str, bytes]]] = field(default_factory=dict)
    """By the path of a record: the operators and keys that are to go."""
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    """By the path of the record, in their order."""
    shown: dict[tuple[str, str], list[bytes | None]] = field(default_factory=dict)
    """The first answer by plan and operator: a completed version does not change."""
    written_anew: set[str] = field(default_factory=set)
    """The names of the changelogs that have replaced others."""
    has_lost_files: bool = False
    """Retention has removed some."""
    plan_of_manifest: dict[int, Plan] = field(default_factory=dict)
    attempts: dict[int, dict[tuple[str, bytes], str]] = field(default_factory=dict)
    """By manifest: whose value each key has."""
    named: set[str] = field(default_factory=set)
    """Attempts that a manifest has named."""
    epoch: int = 0
    """The highest epoch that was claimed."""
    closed: set[int] = field(default_factory=set)
    """The epochs that have a fence."""
    fenced: set[int] = field(default_factory=set)
    answered: dict[tuple[str, int, str, int], set[tuple[str, int]]] = field(default_factory=dict)

    def plan(self, token: str, batch: int, parent: Plan | None) -> Plan:
        """Plan a batch."""
        made = self.plans[token] = Plan(token, batch, parent, self.operators)
        return made

    def spark_commits(self, plan: Plan) -> None:
        """``commits/<batch>`` is written: its values may be seen from now on."""
        self.committed.append(plan)
        if any(key[1] in plan.keys and key in plan.values for e in self.exchanges.values() for key in e.keys):
            sometimes("a key that was forgotten is written again")
        self._may_be_seen(plan)

    def _may_be_seen(self, plan: Plan) -> None:
        for operator in self.operators:
            for key in plan.keys:
                seen = self.seen.setdefault((operator, key), {None})
                seen.add(plan.values.get((operator, key)))
                # Hosts of a run that does not know of an exchange yet show what they have made before.
                seen.update(value for value, _ in plan.earlier.get((operator, key), ()))

    def check_read(self, operator: str, key: bytes, value: bytes | None) -> None:
        """A query client reads completed versions only."""
        if value_in(value) not in self.seen.get((operator, key), {None}):
            raise Violation(f"A query read {value!r} for {key!r} of {operator}: no completed version ever had it.")
        if value is not None and attempt_in(value) not in self.named:
            raise Violation(f"A query read {value!r} for {key!r} of {operator}: no manifest ever named that attempt.")

    def check_answer(
        self,
        version: int,
        operator: str,
        keys: list[bytes],
        contents: list[bytes | None],
        is_newest: bool,
        since: float,
        *,
        by_follower: bool = False,
    ) -> None:
        """A query client reads one completed version, and of it what the attempts made that its manifest names.

        The client asked at ``since``: values that were forgotten by then must not be shown. A follower may show the
        attempts of an earlier manifest of the version, until its next look.
        """
        for key, content in zip(keys, contents, strict=True):
            self.check_read(operator, key, content)
        made = self.chain().get(version)
        # The versions of a run that has been replaced may have been replaced themselves.
        if made is None or not is_newest:
            return
        self.check_content(version, made.id, operator, keys, contents, since, by_follower=by_follower)

    def check_content(
        self,
        version: int,
        manifest_id: int,
        operator: str,
        keys: list[bytes],
        contents: list[bytes | None],
        since: float,
        *,
        by_follower: bool,
    ) -> None:
        """A version has the values of its plan, of the attempts that its manifest names."""
        plan, values = self.plan_of_manifest[manifest_id], [value_in(content) for content in contents]
        if not all(plan.may_be((operator, key), value, since) for key, value in zip(keys, values, strict=True)):
            expected = [plan.values.get((operator, key)) for key in keys]
            raise Violation(f"Version {version} of {operator} was read as {values}, and is {expected}.")
        if by_follower:
            return
        self.check_attempts(manifest_id, operator, keys, contents)
        shown = self.shown.setdefault((plan.token, operator), contents)
        for key, first, now in zip(keys, shown, contents, strict=True):
            if first != now and not self.is_forgotten(operator, key):
                raise Violation(f"{key!r} of {operator} was shown as {first!r} in version {version}, now as {now!r}.")

    def check_task_read(
        self, plan: Plan, operator: str, keys: list[bytes], contents: list[bytes | None], is_newest: bool
    ) -> None:
        """A task of batch N reads exactly version N."""
        for key, content in zip(keys, contents, strict=True):
            if not is_before(plan, operator, key, value_in(content)):
                expected = None if plan.parent is None else plan.parent.values.get((operator, key))
                raise Violation(
                    f"A task of batch {plan.batch} ({plan.token}) read {content!r} for {key!r} of {operator}, but "
                    f"version {plan.batch} has {expected!r}."
                )
        made = self.chain().get(plan.batch)
        # That of a run which has been replaced may have been replaced itself.
        if made is not None and is_newest:
            self.check_attempts(made.id, operator, keys, contents)

    def check_attempts(self, manifest_id: int, operator: str, keys: list[bytes], contents: list[bytes | None]) -> None:
        """Check that the values shown are of the attempts that the manifests name."""
        for key, content in zip(keys, contents, strict=True):
            expected = self.attempts[manifest_id].get((operator, key))
            if content is not None and attempt_in(content) != expected:
                raise Violation(
                    f"{key!r} of {operator} has the value of {attempt_in(content)}, but manifest {manifest_id} "
                    "and "
                    f"those below it name {expected}."
                )

    # -- manifests -----------------------------------------------------------------------------

    def head(self) -> Manifest | None:
        """The newest manifest of the highest epoch."""
        return max(self.manifests.values(), key=_EPOCH_AND_ID, default=None)

    def chain(self) -> dict[int, Manifest]:
        """From the head along its parents, with the files that count."""
        head = self.head()
        if head is None:
            return {}

        def manifest(manifest_id: int) -> Manifest | None:
            found = self.manifests.get(manifest_id)
            return None if found is None else self.as_rewritten(found, head)

        return chains.walk(self.as_rewritten(head, head), manifest, str)

    def as_rewritten(self, manifest: Manifest, head: Manifest) -> Manifest:
        """Return the meaning of a manifest where ``head`` is the newest one."""
        for path in head.rewritten:
            manifest = self.records[path].of(manifest)
        return manifest

    def manifest_written(self, data: bytes, files: dict[str, bytes], now: float) -> None:
        """A manifest is durable: does it make one version out of the right files?"""
        manifest = unseal(data, Manifest, "the manifest")
        newest = self.head()
        if self.manifests.get(manifest.id) == manifest:
            sometimes("a file is there again after it was deleted")
            return  # the second request of a hedge, which was late
        if manifest.id in self.manifests and (newest is None or manifest.epoch >= newest.epoch):
            # One that has lost the query may take an id that has been removed since; it counts for nothing.
            raise Violation(f"Manifest {manifest.id} is written twice.")
        self.named.update(entry.attempt for _, _, entry in entries(manifest))
        if manifest.epoch in self.closed or (newest is not None and manifest.epoch < newest.epoch):
            # By a coordinator that has lost the query, and perhaps stalled for long: its answer reaches no client.
            self.fenced.add(manifest.id)
            self.manifests[manifest.id] = manifest
            self.plan_of_manifest[manifest.id] = self.plan_of_attempt[next(entries(manifest))[2].attempt]
            self.attempts[manifest.id] = dict(self.attempts.get(manifest.parent or 0, {}))
            for operator, partition, entry in entries(manifest):
                n = manifest.operators[operator].num_partitions
                for key in self.plan_of_manifest[manifest.id].keys:
                    if partition_of(key, n) == partition:
                        self.attempts[manifest.id][(operator, key)] = entry.attempt
            return
        exchanged = [self._exchanged(path, manifest, now) for path in manifest.rewritten if path not in self.exchanges]
        earlier = self.manifests.get(manifest.parent) if manifest.parent is not None else None
        earlier = None if earlier is None else self.as_rewritten(earlier, manifest)
        if (earlier.version if earlier is not None else 0) != manifest.version - 1:
            raise Violation(f"Manifest {manifest.id} makes version {manifest.version} out of {manifest.parent}.")
        plans = set()
        whose = dict(self.attempts[earlier.id]) if earlier is not None else {}
        for operator, partition, entry in entries(manifest):
            name = f"{operator}/{partition} in manifest {manifest.id} (version {manifest.version})"
            content = content_of(entry.changelog, files)
            if content is None or (len(content), digest(content)) != (entry.changelog.size, entry.changelog.digest):
                raise Violation(f"The changelog {entry.changelog.path} of {name} is not there as the manifest says.")
            meta, changes = read_changelog(content)
            plan = self.plan_of_attempt[meta.attempt]
            plans.add(plan.token)
            if meta.attempt != entry.attempt or meta.version != manifest.version or meta.operator != operator:
                raise Violation(f"The changelog of {name} is of attempt {meta.attempt} and version {meta.version}.")
            made = manifest.operators[operator]
            n = made.num_partitions
            if meta.base == f"{layout_of(operator, made).directory(partition)}/{meta.version - 1}-removed":
                continue  # in place of the changelog below the snapshot where loads begin: no load reads it
            below = earlier.operators[operator] if earlier is not None else None
            if below is not None and (below.num_partitions, below.backend) == (n, made.backend):
                base = below.partitions[partition].changelog.path
                if meta.base != base:
                    raise Violation(f"{name} was made on top of {meta.base}, but the version below is {base}.")
            pairs = changes.families.get("default", SortedPairs.empty())
            held = dict(zip(pairs.keys.to_pylist(), pairs.values.to_pylist(), strict=True))
            lacks = any(o == operator and partition_of(k, n) == partition for o, k in plan.forgotten)
            if lacks and entry.changelog.path not in self.written_anew:
                plan.come_again()
                if plan in self.committed:
                    self._may_be_seen(plan)
                for exchange in self.exchanges.values():
                    exchange.values -= set(plan.values.values())
            keys = [k for k in plan.keys if partition_of(k, n) == partition]
            kept = [k for k in keys if (operator, k) not in plan.forgotten]
            expected = {k: stored(plan.values.get((operator, k)), entry.attempt) for k in kept}
            if held != expected:
                raise Violation(
                    f"The changelog of {name} holds {held}, and should hold what batch {plan.token} makes: {expected}."
                )
            whose.update(((operator, k), entry.attempt) for k in keys)
        if len(plans) != 1:
            raise Violation(f"Manifest {manifest.id} mixes batches that were planned differently: {sorted(plans)}.")
        plan = self.plans[plans.pop()]
        if plan.batch != manifest.version - 1:
            raise Violation(f"Manifest {manifest.id} of version {manifest.version} has changes of batch {plan.batch}.")
        if earlier is not None and self.plan_of_manifest[earlier.id] is not plan.parent:
            raise Violation(
                f"Manifest {manifest.id} puts batch {plan.token} on top of another one than it was planned on."
            )
        if newest is not None and newest.version == manifest.version and newest.run_id != manifest.run_id:
            sometimes("a version that was prepared is made again by another run")
        self.fenced.discard(manifest.id)
        self.attempts[manifest.id] = whose
        self.manifests[manifest.id] = manifest
        self.plan_of_manifest[manifest.id] = plan
        if self.exchanges and not exchanged:
            self._check_forgotten(self.as_rewritten(manifest, manifest), files)

    def _exchanged(self, path: str, manifest: Manifest, now: float) -> Exchange:
        """A manifest that counts names the record of an exchange for the first time."""
        keys = self.to_forget[path]
        self.written_anew.update(ref.path for ref in self.records[path].changelogs.values())
        made = self.exchanges[path] = Exchange(path, keys, now)
        plan: Plan | None = self.plan_of_attempt[next(entries(manifest))[2].attempt]
        forgotten = {p.values[key] for p in self.plans.values() for key in keys if key in p.values}
        changed = {plan}
        for following in self.plans.values():  # in planning order
            if following.parent in changed:
                changed.add(following)
        while plan is not None:
            plan.forget(made)
            plan = plan.parent
        for following in self.plans.values():
            if following in changed and following.parent in changed:
                following.follow(made)
                if following in self.committed:
                    self._may_be_seen(following)
        sometimes("files are exchanged")
        if self.has_lost_files:
            sometimes("files are exchanged after retention has removed others")
        kept = {p.values[key] for p in changed if p is not None for key in keys if key in p.values}
        made.values = frozenset(forgotten - kept)
        return made

    def _check_forgotten(self, manifest: Manifest, files: dict[str, bytes]) -> None:
        """Check that the files which a manifest after an exchange names for the first time have no forgotten value."""
        gone = [value for exchange in self.exchanges.values() for value in exchange.values]
        chain = self.chain()
        for operator, partition, entry in entries(manifest):
            named = {entry.changelog.stored_in}
            for ref in entry.snapshots:
                made = chain.get(ref.version)
                counts = made is not None and made.operators[operator].partitions.head(partition) == ref.head
                if counts and (data := content_of(ref.file, files)) is not None:
                    named |= {ref.file.stored_in, *unseal(data, SnapshotDescriptor, ref.file.path).paths}
            for path in named & files.keys():
                if any(value in files[path] for value in gone):
                    raise Violation(
                        f"{path} has rows of forgotten keys, and counts for {operator}/{partition} by manifest "
                        f"{manifest.id}."
                    )

    def is_forgotten(self, operator: str, key: bytes) -> bool:
        """Whether a key was forgotten, once or more often."""
        return any((operator, key) in exchange.keys for exchange in self.exchanges.values())

    def has_forgotten_rows(self, data: bytes) -> bool:
        """Whether a file has rows of keys that were forgotten."""
        return any(value in data for exchange in self.exchanges.values() for value in exchange.values)

    def reported(self, path: str, now: float, born: Callable[[str], float], files: dict[str, bytes]) -> None:
        """Check the report that nothing is left of some keys: no file from before the exchange may still have them."""
        exchange = self.exchanges[path]
        exchange.reported = now
        for file, data in files.items():
            if born(file) < exchange.began and any(value in data for value in exchange.values):
                raise Violation(f"{file} has rows of keys that were reported as forgotten.")

    def check_acknowledged(
        self, coordinator: str, message: Acknowledge, manifest_id: int | None, num_tasks: int
    ) -> None:
        """A coordinator answers an acknowledgement: if it is the last one, a manifest that counts must be there.

        The manifest with whose id it answers names the changes.
        """
        if manifest_id in self.fenced:
            raise Violation(f"Manifest {manifest_id} was written after its epoch had ended, and is answered for.")
        named = None if manifest_id is None else self.manifests.get(manifest_id)
        if (
            named is not None
            and named.operators[message.operator].partitions[message.partition].changelog != message.file
        ):
            raise Violation(
                f"Attempt {message.attempt} of {message.operator}/{message.partition} is answered with manifest "
                f"{manifest_id}, which does not name it."
            )
        # With a new epoch, the coordinator may have to learn everything again.
        batch = (coordinator, self.epoch, message.run_id, message.version)
        answered = self.answered.setdefault(batch, set())
        answered.add((message.operator, message.partition))
        if len(answered) == num_tasks and not any(
            (m.run_id, m.version) == (message.run_id, message.version) for m in self.manifests.values()
        ):
            raise Violation(
                f"The last acknowledgement of version {message.version} of {message.run_id} is answered, and no "
                "manifest "
                "is there."
            )

    def check_openable(self, files: dict[str, bytes]) -> None:
        """Every version that the newest manifest says is kept can be opened from the files that are there."""
        head = self.head()
        if head is None:
            return
        chain = self.chain()
        for m in chain.values():
            if manifest_path(m) not in files:
                raise Violation(f"Manifest {m.id} (version {m.version}) is kept, but was removed.")
        for operator, held in head.operators.items():
            layout = Layout(operator, held.num_partitions, held.backend)
            for partition in range(held.num_partitions):
                for version in {max(head.oldest, 1), head.version}:
                    found = chains.lineage(chain, version, layout, partition, KEY_GROUPS)
                    if not self._opens(found, files):
                        raise Violation(
                            f"Version {version} of {operator}/{partition} is kept, but cannot be opened any more: "
                            f"{self._missing(found, files)}."
                        )

    def _opens(self, lineage: Lineage, files: dict[str, bytes]) -> bool:
        """Whether the files that are there lead to a version."""
        lowest = lineage.version
        for ref in reversed(lineage.changelogs):
            if ref.version != lowest or ref.file.stored_in not in files:
                break
            lowest -= 1
        if any(lowest <= s.version <= lineage.version and self._is_sound(s, files) for s in lineage.snapshots):
            return True
        if lineage.rescaled is not None and lineage.rescaled.version == lowest:
            return all(self._opens(source.lineage, files) for source in lineage.rescaled.sources)
        return lowest == 0

    def _missing(self, lineage: Lineage, files: dict[str, bytes]) -> str:
        gone = [ref.version for ref in lineage.changelogs if ref.file.stored_in not in files]
        there = [ref.version for ref in lineage.changelogs if ref.file.stored_in in files]
        sound = [s.version for s in lineage.snapshots if self._is_sound(s, files)]
        below = (
            ""
            if lineage.rescaled is None
            else "; below it "
            + ", ".join(f"{s.directory}: {self._missing(s.lineage, files)}" for s in lineage.rescaled.sources)
        )
        return f"changelogs {there} are there, {gone} are not, snapshots {sound}{below}"

    @staticmethod
    def _is_sound(ref: SnapshotRef, files: dict[str, bytes]) -> bool:
        data = content_of(ref.file, files)
        return data is not None and all(p in files for p in unseal(data, SnapshotDescriptor, ref.file.path).paths)

    def check_durable(self, plan: Plan, run_id: str, files: dict[str, bytes], n: int, backend: str) -> None:
        """Spark has committed a batch: its version must be there, or be recoverable from its changelogs."""
        chain = self.chain()
        made = chain.get(plan.batch + 1)
        if made is not None and self.plan_of_manifest[made.id] is plan:
            return
        head = self.head()
        above = self.plan_of_manifest[head.id] if head is not None else None
        while above is not None and above.batch > plan.batch:
            above = above.parent
        if above is plan:
            return  # it comes late: others have already built on that version
        found = set()
        for meta in _commits(files, plan.batch + 1):
            if (meta.query_run_id, meta.num_partitions) != (run_id, n):
                continue
            layout = Layout(meta.operator, n, backend)
            base = chains.head_of(chain, plan.batch, layout, meta.partition, KEY_GROUPS)
            if meta.base == base:
                found.add((meta.operator, meta.partition))
        if lacking := {(o, p) for o in self.operators for p in range(n)} - found:
            raise Violation(
                f"Spark has committed batch {plan.batch} ({plan.token}) of {run_id}, but no manifest names it, and "
                "nothing "
                f"is durable of {sorted(lacking)}."
            )
        sometimes("Spark commits a batch that no manifest names")


def _commits(files: dict[str, bytes], version: int) -> Iterator[ChangelogMeta]:
    """Which commits of a version are durable."""
    for path, data in files.items():
        if version_in(path) != version:
            continue
        if path.endswith(".changelog"):
            yield read_changelog(data)[0]
        elif path.endswith(".changelogs"):
            length = int.from_bytes(data[-16:-8], "little")
            index = unseal(data[-16 - length : -16], GroupIndex, path)
            yield from (read_changelog(data[p.offset : p.offset + p.size])[0] for p in index.parts)


def to_array(values: list[bytes]) -> pa.BinaryArray:
    """Keys as hosts take them."""
    return pa.array(values, pa.binary())


@dataclass
class Stream:
    """One query of a world. ``layout_of_run`` gives each run's number of partitions and backend.

    A batch may take ``most_seconds`` (virtual); None where much goes wrong.
    """

    name: str
    model: Model
    num_partitions: int
    backend: str
    most_seconds: float | None = None
    layout_of_run: dict[str, tuple[int, str]] = field(default_factory=dict)
    newest_run: str = ""
    superseded: set[str] = field(default_factory=set)
    """Runs superseded by a client that is not a run: they still work, and cannot know that their work is lost."""
    num_runs: int = 0
    keep: int = 4
    """So many versions and batches are retained."""
    keep_seconds: int = 0
    """Versions that were the newest one within so many seconds are retained, too."""
    batches: int = 0
    committed: dict[str, int] = field(default_factory=dict)
    """By run, the version of the last batch that Spark has committed."""

    def is_newest(self, run_id: str) -> bool:
        """Return whether a run is the last one that has registered, and its epoch has not been ended since."""
        return run_id == self.newest_run and run_id not in self.superseded

    @property
    def checkpoint(self) -> str:
        """Spark's checkpoint location."""
        return f"sim://{self.name}"

    @property
    def state(self) -> str:
        """Where the state is kept."""
        return f"{self.checkpoint}/statestore"
