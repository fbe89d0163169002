"""Fences: a claim closes the lower epochs, so that writing a manifest is one request."""

from __future__ import annotations

from typing import Any

import pytest

from backends.exceptions import MissingFileError, StorageError
from backends.formats.manifest import Manifest
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.durable.fencing import EPOCHS, FENCE, KEPT_CLAIMS, MANIFESTS, EpochFile, place_path
from coordinator_actor.durable.manifests import ManifestLog, manifest_path
from coordinator_actor.exceptions import FencedError
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server


class Stored:
    """Files of one query in memory. ``before`` is called before each request is made, ``asked`` has all of them."""

    def __init__(self, name: str) -> None:
        self.location = f"memory://{name}/ck"
        self.asked: list[tuple[str, str]] = []
        self.before: Any = lambda verb, path: None
        self.storage = CheckpointStorage.open(self.location)
        sender: Any = self.storage._sender
        send = sender.send

        def heard(verb: str, path: str, call: Any, **more: Any) -> Any:
            self.asked.append((verb, path))
            self.before(verb, path)
            return send(verb, path, call, **more)

        sender.send = heard

    def log(self, name: str) -> ManifestLog:
        """Return one coordinator's view of it."""
        return ManifestLog(self.storage, name)


@pytest.fixture
def stored(request: pytest.FixtureRequest) -> Stored:
    return Stored(request.node.name.replace("[", "-").replace("]", ""))


def manifest(log: ManifestLog, version: int, manifest_id: int | None = None) -> Manifest:
    return Manifest(manifest_id or version, None, version, log.epoch, "run", 0, {}, chain_from=version)


def test_a_manifest_is_one_request(stored: Stored) -> None:
    log, counter = stored.log("one"), CheckpointIDCounter(4)
    log.claim("run1")
    stored.asked.clear()
    for version in (1, 2, 3):
        log.append(manifest(log, version), counter)
    assert stored.asked == [("write", place_path(1, sequence)) for sequence in (1, 2, 3)]


def test_a_claim_closes_all_lower_epochs_and_none_twice(stored: Stored) -> None:
    logs = [stored.log(f"c{i}") for i in range(4)]
    for log in logs[:3]:
        log.claim(log.epochs._coordinator_id)
        log.append(manifest(log, 1, log.epoch), CheckpointIDCounter(9))
    # The last claim died before it closed anything.
    stored.storage.delete(place_path(2, 2))
    stored.asked.clear()
    logs[3].claim("c3")
    assert [path for verb, path in stored.asked if verb == "write" and path.startswith(MANIFESTS)] == [
        place_path(2, 2),
        place_path(3, 2),
    ]
    assert sorted(logs[3].manifests) == [1, 2, 3]
    for log in logs[:3]:
        with pytest.raises(FencedError, match="taken over by another coordinator"):
            log.append(manifest(log, 2, 7), CheckpointIDCounter(9))
    assert not [p for p, _ in stored.storage.list(MANIFESTS) if p.endswith(f"{3:020d}.json")], "nothing behind a fence"


@pytest.mark.parametrize("moment", [("write", EPOCHS), ("list", MANIFESTS), ("write", MANIFESTS)])
def test_a_manifest_that_is_written_during_a_claim_is_read(stored: Stored, moment: tuple[str, str]) -> None:
    """It comes before the claim, before the lower epochs are looked at, or before the fence: it is answered for."""
    old, new = stored.log("old"), stored.log("new")
    old.claim("run1")
    old.append(manifest(old, 1), CheckpointIDCounter(3))

    def meanwhile(verb: str, path: str) -> None:
        if verb == moment[0] and path.startswith(moment[1]):
            stored.before = lambda verb, path: None
            old.append(manifest(old, 2), CheckpointIDCounter(3))

    stored.before = meanwhile
    new.claim("run2")
    assert sorted(new.manifests) == [1, 2]
    assert new.append(manifest(new, 3), CheckpointIDCounter(4)).epoch == 2
    with pytest.raises(FencedError):
        old.append(manifest(old, 3), CheckpointIDCounter(4))


def test_a_manifest_whose_answer_was_lost_is_read_and_the_next_has_a_higher_id(stored: Stored) -> None:
    log, counter = stored.log("one"), CheckpointIDCounter(2)
    log.claim("run1")
    put_new = stored.storage.put_new

    def lost(path: str, data: bytes) -> Any:
        put_new(path, data)
        raise StorageError("the answer is lost")

    stored.storage.put_new = lost  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        log.append(manifest(log, 1), counter)
    stored.storage.put_new = put_new  # type: ignore[method-assign]
    assert log.manifests == {}
    again = log.append(manifest(log, 1, counter.get_and_increment()), counter)
    assert (again.id, again.sequence, sorted(log.manifests)) == (2, 2, [1, 2])


def test_manifests_of_an_earlier_release_are_read_and_epochs_without_any_are_closed(stored: Stored) -> None:
    old, new = stored.log("old"), stored.log("new")
    old._files.create(f"{EPOCHS}/{1:020d}.json", EpochFile(1, "old", "run1"))
    old._files.create(f"{MANIFESTS}/{5:020d}.json", manifest(old, 4, 5))
    new.claim("run2")
    assert sorted(new.manifests) == [5] and stored.storage.get(place_path(1, 1)) == FENCE
    kept = new.append(manifest(new, 5, 6), CheckpointIDCounter(7))
    assert [manifest_path(m) for m in new.unneeded({kept.id})] == [f"{MANIFESTS}/{5:020d}.json"]
    new.forget({kept.id})
    assert new.unneeded({kept.id}) == []


def test_a_place_whose_manifest_was_removed_during_the_claim_is_passed(stored: Stored) -> None:
    old, new = stored.log("old"), stored.log("new")
    old.claim("run1")

    def meanwhile(verb: str, path: str) -> None:
        if (verb, path) == ("write", place_path(1, 1)):
            stored.before = removed
            old.append(manifest(old, 1), CheckpointIDCounter(3))

    def removed(verb: str, path: str) -> None:
        # Behind the refused fence, before what is there is looked at.
        if (verb, path) == ("read", place_path(1, 1)):
            stored.before = lambda verb, path: None
            stored.storage.delete(path)

    stored.before = meanwhile
    new.claim("run2")
    assert stored.storage.get(place_path(1, 2)) == FENCE and new.manifests == {}


def test_a_coordinator_that_stalled_during_many_claims_notices_though_the_next_claim_is_gone(stored: Stored) -> None:
    slow = stored.log("slow")
    slow.claim("run1")
    assert slow.epochs.newest() is not None
    for i in range(KEPT_CLAIMS + 1):
        other = stored.log(f"c{i}")
        other.claim(f"other{i}")
    stored.storage.delete_all(other.epochs.obsolete())
    with pytest.raises(FencedError, match="has epoch 2"):
        slow.claim("run2")


def test_a_claim_behind_a_look_lists_the_claims_once(stored: Stored) -> None:
    stored.log("old").claim("run1")
    log = stored.log("new")
    stored.asked.clear()
    assert log.epochs.newest() is not None
    log.claim("run2")
    epochs = [verb for verb, path in stored.asked if path.startswith(EPOCHS)]
    assert epochs == ["list", "read", "write", "list"], (
        "the existing epochs, and after the claim whether a rival was faster"
    )
    stored.log("newer").claim("run3")
    log.claim("run4")
    assert log.epoch == 4, "a look counts for one claim"


def test_a_stale_listing_hides_neither_claims_nor_the_newest_manifests(servers: tuple[S3Server, FaultProxy]) -> None:
    server, proxy = servers
    server.make_bucket("stale")
    options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true"}
    options |= {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}
    proxy.plan = []
    old, new = (ManifestLog(CheckpointStorage.open("s3://stale/ck", options), name) for name in ("old", "new"))
    for run in ("run1", "run2"):
        old.claim(run)
    for version in (1, 2, 3):
        old.append(manifest(old, version), CheckpointIDCounter(4))
    # The listings know nothing of the last claim, nor of the last two manifests.
    hidden = (f"{2:020d}.json<", place_path(2, 2), place_path(2, 3))
    proxy.plan = [Fault("hide", hidden="|".join(hidden), times=100)]
    new.claim("run3")
    assert new.epoch == 3 and max(new.manifests) == 3, "the newest manifest is read by its name"
    assert new.storage.get(place_path(2, 4)) == FENCE
    with pytest.raises(FencedError):
        old.append(manifest(old, 4), CheckpointIDCounter(5))
    proxy.plan = []
    new.refresh()
    assert sorted(new.manifests) == [1, 2, 3]


def test_a_coordinator_that_stalled_for_many_epochs_removes_nothing(stored: Stored) -> None:
    old = stored.log("old")
    old.claim("run1")
    old.epochs.check()
    for i in range(3):
        stored.log("new").claim(f"run{i}")
    stored.storage.delete(f"{EPOCHS}/{2:020d}.json")
    with pytest.raises(FencedError, match=r"00000004\.json"):
        old.epochs.check()


@pytest.mark.parametrize("times", [1, 100])
def test_a_reader_whose_newest_manifest_is_removed_before_the_read_lists_again(stored: Stored, times: int) -> None:
    """It stands still after its listing: older manifests that are still there must not be taken for the newest."""
    log, counter = stored.log("one"), CheckpointIDCounter(4)
    log.claim("run1")
    log.append(manifest(log, 1), counter)
    log.append(manifest(log, 2), counter)
    reader, left = ManifestLog(stored.storage, "reader"), [times]

    def replaced(verb: str, path: str) -> None:
        newest = place_path(1, log.manifests[max(log.manifests)].sequence)
        if verb == "read" and path == newest and left[0]:
            left[0] -= 1
            log.append(manifest(log, max(m.version for m in log.manifests.values()) + 1), counter)
            stored.storage.delete(newest)

    stored.before = replaced
    if times == 1:
        reader.refresh()
        head = reader.head()
        assert head is not None and head.version == 3 and set(reader.chain()) == {3}
    else:
        with pytest.raises(MissingFileError, match=r"gone before it was read.*Try again"):
            reader.refresh()


@pytest.mark.parametrize("has_looked", [False, True], ids=["claims after", "has looked before"])
def test_a_run_that_was_ended_from_outside_claims_nothing_more(stored: Stored, has_looked: bool) -> None:
    """``has_looked``: its restarted coordinator has read the newest claim before that of the other process came."""
    stored.log("coordinator").claim("run1")
    restarted = stored.log("restarted")
    if has_looked:
        restarted.epochs.newest()
    stored.log("forget_keys").claim("run1", ends_run=True)
    with pytest.raises(FencedError, match=r"epochs/0*2\.json"):
        restarted.claim("run1")
    stored.log("forget_keys").claim("run1", ends_run=True)
    stored.log("restarted").claim("run2")
