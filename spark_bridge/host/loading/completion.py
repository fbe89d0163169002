"""Completing versions: the accepted changes of a batch that Spark has committed become the state that is read."""

from __future__ import annotations

import logging

from backends.exceptions import LineageMismatchError, LocalStateDamagedError, StoreClosedError
from backends.tracing import spans, trace_ids
from coordinator_actor.messages import Completed
from spark_bridge.host.coordination.completed_versions import CompletedVersions
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import REMEMBERED_COMMITS, Instance
from spark_bridge.host.loading.kept_partitions import KeptPartitions
from spark_bridge.host.loading.unloading import PartitionUnloading

log = logging.getLogger(__name__)


def apply_accepted(instance: Instance, version: int, head: str) -> bool:
    """Apply the accepted changes that made ``head``; return False if the partition has not got them."""
    trace = trace_ids.batch(instance.registration.run_id, version)
    try:
        with spans.span("host.apply", trace, operator=instance.operator, partition=instance.partition):
            instance.state.complete(version, head)
    except LineageMismatchError:
        return False
    except LocalStateDamagedError as error:
        log.warning("Version %d of %s is loaded anew: %s", version, instance, error)
        return False
    for done in [v for v in instance.acknowledged if v <= version]:
        del instance.acknowledged[done]
    earlier = {v: keys for v, keys in instance.keys_at.items() if version - REMEMBERED_COMMITS < v < version}
    instance.keys_at = {**earlier, version: instance.state.reads.num_keys(version)}
    return True


class VersionCompletion:
    """Completes versions in the partitions that a host holds. Thread-safe."""

    def __init__(
        self,
        held: HeldPartitions,
        completed: CompletedVersions,
        kept: KeptPartitions,
        unloading: PartitionUnloading,
    ) -> None:
        self._held = held
        self._completed = completed
        self._kept = kept
        self._unloading = unloading

    def complete(self, completed: Completed) -> None:
        """Apply the accepted changes of a version that Spark has committed.

        Readers see the version in all partitions at once, before it is applied.
        """
        self._completed.note(completed)
        known = self._held.last_exchange(completed.run_id)
        is_clean = True
        if completed.rewritten != known:
            self._held.tell_exchanged(completed.run_id)
            # Copies may be of the files from before. One that is being loaded now may become one.
            registration = self._held.registration(completed.run_id)
            location = None if registration is None else registration.state_location
            self._kept.drop(lambda kept: completed.run_id == kept.registration.run_id or location == kept.key[0])
            is_clean = not self._kept.may_be_of_state(location, but_for=completed.run_id)
        for instance in self._held.of_run(completed.run_id):
            owned = completed.heads.get(instance.operator)
            if owned is None or instance.state.version > completed.version:
                is_clean &= owned is not None
                continue
            head = owned.get(instance.partition)
            if instance.state.version == completed.version:
                if instance.state.head != head and (head is not None or completed.rewritten != known):
                    # The files of the version were exchanged: keys that the new files lack must be gone here as well.
                    self._unloading.unload(instance, waits=False)
                    is_clean &= not self._held.holds(instance)
                continue
            if not instance.commit_lock.acquire(blocking=False):
                is_clean = False
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                stale = head is None or not apply_accepted(instance, completed.version, head)
            except StoreClosedError:
                continue  # the partition was unloaded meanwhile
            finally:
                instance.commit_lock.release()
            if stale and not self._held.has_ended(completed.run_id):
                # Another host owns the partition by now, or this version was made by another host or by an earlier
                # incarnation of this one. If the partition is still this host's, the next open loads it; or it is
                # loading it now, and what was loaded must stay.
                self._unloading.unload(instance, waits=False)
            # The coordinator never accepted changes made on top of exchanged files.
            is_clean &= not stale or not self._held.holds(instance)
        if is_clean:
            self._held.note_exchanged(completed.run_id, completed.rewritten)
