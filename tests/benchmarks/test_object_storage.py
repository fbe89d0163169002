"""The proxy counts what a bill counts, and the played stream is a real one: versions complete, files are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparisons.object_storage import dollars_a_month
from played import Shape, played_cluster
from slow_s3 import kind_of, proxy_before

from backends.exceptions import MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.storage.s3_faults import FaultProxy, S3Server


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("GET", "/b/ck/statestore/manifests/1.json", "GET"),
        ("GET", "/b?list-type=2&prefix=ck%2Fstatestore%2F", "LIST"),
        ("HEAD", "/b/ck/commits/1", "HEAD"),
        ("PUT", "/b/ck/a.changelog", "PUT"),
        ("POST", "/b/ck/a.sst?uploads", "PUT"),
        ("DELETE", "/b/ck/a.changelog", "DELETE"),
        ("POST", "/b?delete", "bulk DELETE"),
    ],
)
def test_a_request_is_of_the_kind_that_a_bill_names(method: str, target: str, kind: str) -> None:
    assert kind_of(method, target) == kind


def test_a_month_of_a_put_and_a_look_a_batch() -> None:
    assert dollars_a_month({"PUT": 1.0, "HEAD": 1.0, "DELETE": 3.0}) == pytest.approx(2_592_000 * 5.4e-6)


def test_the_proxy_counts_requests_and_resets_its_counts_when_they_are_read(
    servers: tuple[S3Server, FaultProxy],
) -> None:
    server, _ = servers
    server.make_bucket("counted-by-kind")
    with proxy_before(server.port) as s3:
        through = CheckpointStorage.open("s3://counted-by-kind/ck", s3.options())
        past = CheckpointStorage.open("s3://counted-by-kind/ck", s3.options(s3.direct))
        past.put_new("uncounted", b"x")
        through.put_new("a", b"12345")
        assert through.get("a") == b"12345" and through.exists("a") and len(through.list()) == 2
        with pytest.raises(MissingFileError):
            through.get("b")
        through.delete("a")
        counted = s3.traffic("counted-by-kind")
        assert counted.requests == {"PUT": 1, "GET": 2, "HEAD": 1, "LIST": 1, "bulk DELETE": 1}
        assert counted.sent > 5 and counted.received > 5  # a removal sends the names as XML
        assert not s3.traffic("counted-by-kind").requests
        s3.make_bucket("other")
        CheckpointStorage.open("s3://other/ck", s3.options()).put_new("a", b"x")
        assert s3.traffic("other").requests == {"PUT": 1} and not s3.traffic("counted-by-kind").requests


@pytest.mark.thorough  # otherwise: make bench-smoke, which plays the same stream
def test_a_played_stream_completes_versions_takes_snapshots_and_removes_files(tmp_path: Path) -> None:
    shape = Shape(hosts=2, partitions=3, keys=5, retain=2)
    with played_cluster(tmp_path / "hosts", 2) as cluster:
        stream = cluster.start(str(tmp_path / "ck"), shape)
        assert len(stream.run(41)) == 41
        described = [player.order("describe") for player in cluster.players]
        assert all(host["storage_requests"]["put"] >= 41 for host in described)
        owned = [i["partition"] for host in described for i in host["instances"]]
        assert sorted(owned) == [0, 1, 2]
    state = tmp_path / "ck" / "statestore"
    versions = {int(p.name.split("-")[0]) for p in state.rglob("*.changelog*")}
    assert max(versions) == 41 and min(versions) > 1
    assert {int(p.name.split("-")[0]) for p in state.rglob("*.snapshots")} >= {30, 40}
