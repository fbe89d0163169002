"""Clients that take the answers of standby replicas: exact, of the version that comes with them, and never too old."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, QueryTimeoutError, RequestError
from spark_bridge.queryable.protocol import At, KeyRowsRequest
from spark_bridge.queryable.reads.answer_version import VersionedReader
from spark_bridge.queryable.routing.router import SeenVersions, StateRouter, VersionAlignment
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.queryable.routing.router_world import asked, located, owned_by, soon, stored


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, hosts=2, partitions=4, standby_replicas=1)
    cluster.batch({user: (user, "a") for user in range(200)})
    cluster.batch({user: (2 * user, "b") for user in range(200)})
    until_current(cluster)
    prolong_leases(cluster)
    yield cluster
    cluster.close()


def until_current(cluster: Cluster) -> None:
    """Wait until each partition has a copy at the completed version."""
    deadline = time.monotonic() + PATIENCE
    while True:
        warm = [h.host.hand_overs.report().warm.get(cluster.run, {}).get("totals", {}) for h in cluster.hosts]
        if sum(version == cluster.version for copies in warm for version in copies.values()) == cluster.partitions:
            return
        assert time.monotonic() < deadline, warm
        for h in cluster.hosts:
            h.host.heartbeat()
        time.sleep(0.01)


def prolong_leases(cluster: Cluster) -> None:
    """Let the hosts rely on their leases although no heartbeats are sent: a busy computer may take long for a test."""
    for h in cluster.hosts:
        h.host.registration._leased_until = math.inf


def hang(cluster: Cluster, i: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make a host accept requests and answer none, until the event is set."""
    go_on, read = threading.Event(), VersionedReader.read
    host = cluster.hosts[i].host

    def hanging(self: Any, *args: Any) -> Any:
        if self._host is host:
            go_on.wait(PATIENCE)
        return read(self, *args)

    monkeypatch.setattr(VersionedReader, "read", hanging)
    return go_on


@pytest.mark.parametrize("direct", [True, False])
def test_stale_reads_are_answered_while_the_owner_hangs(cluster, monkeypatch, direct):
    client = cluster.client(direct=direct, hosts=(1,))
    users = [*owned_by(cluster, 0)[:5], *owned_by(cluster, 1)[:5]]
    assert client.get("totals", users[0], staleness="1 version") == {"n": 2 * users[0], "name": "b"}
    go_on = hang(cluster, 0, monkeypatch)
    try:
        for user in users:
            assert client.get("totals", user, staleness="1 version") == {"n": 2 * user, "name": "b"}
        rows = client.get_many("totals", users, staleness=1, as_="pylist")
        assert [row["n"] for row in rows] == [2 * user for user in users]
        assert client.answered_version == 2
    finally:
        go_on.set()


def test_stale_reads_are_answered_after_the_owner_is_lost_and_before_another_one_owns_the_partition(cluster):
    client = cluster.client(direct=True, hosts=(1,), timeout=1.0)
    user = owned_by(cluster, 0)[0]
    assert client.get("totals", user)["n"] == 2 * user
    cluster.hosts[0].kill()
    assert client.get("totals", user, staleness="1 version")["n"] == 2 * user
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user)


def test_a_copy_that_is_too_old_does_not_answer(cluster):
    client = cluster.client(direct=True, hosts=(1,))
    users = owned_by(cluster, 0)[:1]
    owner, standby = cluster.hosts
    for batch in range(3, 6):  # the standby learns of versions, and its copies do not follow
        cluster.batch({user: (batch * user, "c") for user in range(200)}, complete=False)
        cluster.c.batch_committed(cluster.run, cluster.version - 1)
        owner.host.heartbeat()
        standby.host.completed.note(cluster.c.completed(cluster.run, "h1"))
    owner.kill()
    client._access.timeout = 1.0
    with pytest.raises(QueryTimeoutError):
        client.get("totals", users[0], staleness="2 versions", timeout=1.0)
    assert client.get("totals", users[0], staleness="3 versions")["n"] == 2 * users[0]
    assert client.answered_version == 2


def test_a_client_may_be_given_a_version_older_than_it_has_seen_only_as_far_as_it_allows(cluster):
    client = cluster.client(direct=True, hosts=(1,))
    user = owned_by(cluster, 0)[0]
    cluster.batch({user: (1, "c")}, complete=False)
    cluster.c.batch_committed(cluster.run, cluster.version - 1)
    cluster.hosts[0].host.heartbeat()
    assert client.get("totals", user)["n"] == 1 and client.answered_version == 3
    cluster.hosts[0].kill()
    assert client.get("totals", user, staleness="1 version")["n"] == 2 * user
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user, timeout=1.0)
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user, staleness=0, timeout=1.0)


def test_a_copy_does_not_answer_once_its_host_has_not_heard_from_the_coordinator_for_long(cluster):
    client = cluster.client(direct=True, hosts=(1,))
    user = owned_by(cluster, 0)[0]
    cluster.hosts[0].kill()
    assert client.get("totals", user, staleness="1 version")["n"] == 2 * user
    cluster.hosts[1].host.registration._leased_until = 0.0
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user, staleness="1 version", timeout=1.0)


def test_a_host_that_has_registered_again_answers_only_once_it_knows_the_versions(cluster):
    client = cluster.client(direct=True, hosts=(1,))
    owner, standby = cluster.hosts
    user = owned_by(cluster, 0)[0]
    for batch in range(3, 8):
        cluster.batch(dict.fromkeys(range(200), (batch, "c")), complete=False)
        cluster.c.batch_committed(cluster.run, cluster.version - 1)
        owner.host.heartbeat()
    standby.host.register()  # it was cut off until now
    owner.kill()
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user, staleness="1 version", timeout=1.0)
    standby.host.loader.follow = lambda *_: []  # its copies stay as old as they are
    standby.host.heartbeat()
    until = time.monotonic() + PATIENCE
    while not standby.host.knows_newest(cluster.run):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(QueryTimeoutError):
        client.get("totals", user, staleness="1 version", timeout=1.0)
    assert client.get("totals", user, staleness="5 versions")["n"] == 2 * user


def test_a_host_that_owns_nothing_answers_from_its_copies(tmp_path):
    cluster = Cluster(tmp_path, hosts=2, partitions=1, standby_replicas=1)
    try:
        cluster.batch({user: (user, "a") for user in range(20)})
        cluster.batch({user: (2 * user, "b") for user in range(20)})
        until_current(cluster)
        prolong_leases(cluster)
        (owner,) = {owner.host_id for owner in located(cluster).owners}
        client = cluster.client(direct=True, hosts=(0 if owner == "h1" else 1,))
        assert client.get("totals", 3)["n"] == 6
        cluster.hosts[int(owner.removeprefix("h"))].kill()
        assert client.get("totals", 3, staleness="1 version")["n"] == 6
    finally:
        cluster.close()


def test_without_a_copy_the_owner_answers(tmp_path):
    cluster = Cluster(tmp_path, hosts=2, partitions=4)
    try:
        cluster.batch({user: (user, "a") for user in range(20)})
        prolong_leases(cluster)
        client = cluster.client(direct=True)
        assert [client.get("totals", user, staleness="1 version")["n"] for user in range(20)] == [*range(20)]
        assert sum(asked(cluster, "lookup")) <= 20, "no second request went out"
    finally:
        cluster.close()


def test_staleness_that_makes_no_sense_is_refused(cluster):
    client = cluster.client()
    for staleness in ("1 second", "some", -1, True, "1.5 versions"):
        with pytest.raises(RequestError, match="not a number of versions, such as '1 version'"):
            client.get("totals", 1, staleness=staleness)
    for arguments in ({"version": 1}, {"isolation": "latest"}):
        with pytest.raises(RequestError, match="needs isolation='completed'"):
            client.get_many("totals", [1], staleness="1 version", **arguments)


def test_rows_of_keys_are_answered_by_copies_as_well(cluster, connections):
    """Windows, lists and maps of a key are read as rows."""
    location, router = located(cluster), StateRouter(connections)
    users = [*owned_by(cluster, 0)[:3], *owned_by(cluster, 1)[:3]]
    cluster.hosts[0].kill()
    request = KeyRowsRequest("", "totals", at=At(staleness=1))
    answer = router.key_rows(location, request, stored(users), soon())
    rows = sorted(row["user"] for batch in answer.batches for row in batch.to_pylist())
    assert answer.version == 2 and rows == sorted(users)


@pytest.mark.parametrize("failure", [NotOwnerError("a copy"), HostUnavailableError("hangs"), OSError("lost")])
@pytest.mark.parametrize("is_ahead_lost", [True, False])
def test_answers_of_a_copy_and_of_an_owner_are_aligned_at_the_version_that_both_can_give(failure, is_ahead_lost):
    """A copy has one version, and its owner, which has more, may hang for as long as the client waits."""
    versions, lost = [3, 2], 0 if is_ahead_lost else 1

    class Hosts:
        def answers(self, requests, at, deadline):
            return [self.answer(request, at, deadline) for (request,) in requests]

        def is_slow(self, request):
            return request == lost

        def answer(self, request, at, deadline):
            version = at.version if at.isolation == "version" else max(at.version, versions[request])
            if request == lost and version != versions[request]:
                assert deadline < soon() - 1, "the client waits for a lost host"
                raise failure
            return version, request

    class Request(int):
        def alternatives(self):
            return [self]

    alignment = VersionAlignment(Hosts(), SeenVersions(), Hosts(), time.monotonic)
    answer = alignment.answers("run", [Request(0), Request(1)], At(staleness=1), soon())
    assert answer == (versions[lost], [0, 1])


@pytest.mark.parametrize("staleness", [0, 1])
def test_owners_that_answer_slowly_have_all_the_time_there_is(staleness):
    deadline = soon()

    class Hosts:
        def answers(self, requests, at, until):
            assert until == deadline
            return [(at.version or 3 - request, request) for request in map(int, np.ravel(requests))]

        def is_slow(self, request):
            return False

    class Request(int):
        def alternatives(self):
            return [self]

    alignment = VersionAlignment(Hosts(), SeenVersions(), Hosts(), time.monotonic)
    answer = alignment.answers("run", [Request(0), Request(1)], At(staleness=staleness), deadline)
    assert answer == (2, [0, 1])


def test_without_staleness_a_lost_owner_is_an_error_that_the_caller_retries():
    class Hosts:
        def answers(self, requests, at, deadline):
            if at.isolation == "version":
                raise NotOwnerError("It has moved.")
            return [(3 - request, request) for request in requests]

    with pytest.raises(NotOwnerError):
        VersionAlignment(Hosts(), SeenVersions(), Hosts(), time.monotonic).answers("run", [0, 1], At(), soon())
