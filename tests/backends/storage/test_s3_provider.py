"""A provider on S3, while the network and the service fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import StorageError
from tests.backends.storage.s3_bucket import S3, again
from tests.backends.storage.s3_faults import Fault
from tests.effort import only_thorough

pytestmark = pytest.mark.long


def open_provider(s3: S3, local_dir: Path) -> RocksDBStateStoreProvider:
    location = f"s3a://{s3.bucket}/ck"
    conf = StateStoreConf(deltas_per_snapshot=3, min_versions_to_retain=3)
    # All threads share the clock: when one of them waits, time passes for the others too.
    storage = s3.open(f"{location}/statestore", retry_seconds=300)
    return RocksDBStateStoreProvider(StateStoreId(location, "op", 0), conf, local_dir, storage=storage)


def commit(provider: RocksDBStateStoreProvider, version: int, **pairs: str) -> int:
    store = provider.get_store(version)
    for key, value in pairs.items():
        store.put(key.encode(), value.encode())
    return store.commit()


def content(provider: RocksDBStateStoreProvider, version: int) -> dict[str, str]:
    store = provider.get_read_store(version)
    found = {key.decode(): value.decode() for key, value in store.iterator()}
    store.abort()
    return found


def test_sparks_settings_reach_a_provider_through_its_conf(s3: S3) -> None:
    conf = StateStoreConf(storage_options=s3.options(s3.server.endpoint))
    with RocksDBStateStoreProvider(StateStoreId(f"s3a://{s3.bucket}/dir", "op", 0), conf) as provider:
        commit(provider, 0, a="1")
    paths = [path for path, _ in s3.direct().list()]
    assert any(p.endswith(".changelog") for p in paths) and any("/manifests/" in p for p in paths)


def test_storage_does_not_delay_reads_of_loaded_state(s3: S3, tmp_path: Path) -> None:
    with open_provider(s3, tmp_path) as provider:
        commit(provider, 0, a="1")
        store = provider.get_read_store(1)
        assert store.get(b"a") == b"1"
        s3.plan()
        assert [store.get(b"a") for _ in range(100)] == [b"1"] * 100
        assert s3.proxy.seen == [], "no request was made"


def test_a_provider_works_though_requests_fail_all_the_time(s3: S3, tmp_path: Path) -> None:
    # Of every seven requests or so three are struck, at changing distances.
    s3.plan(
        Fault("answer", times=10_000, skip=2, recurs=True),
        Fault("drop_after", times=10_000, skip=3, recurs=True),
        Fault("answer_after", times=10_000, skip=4, recurs=True, status=500),
        Fault("cut", "GET", times=10_000, skip=5, recurs=True, keep=3),
    )
    with open_provider(s3, tmp_path / "one") as provider:
        for version in range(4):
            assert commit(provider, version, **{f"k{version}": "x" * version, "last": str(version)}) == version + 1
            provider.do_maintenance()
    expected = {**{f"k{i}": "x" * i for i in range(4)}, "last": "3"}
    with open_provider(s3, tmp_path / "two") as again:
        assert again.latest_version() == 4
        assert content(again, 4) == expected
        assert content(again, 3)["last"] == "2"
        assert commit(again, 4, k0="new") == 5
    with open_provider(s3, tmp_path / "three") as third:
        assert content(third, 5) == {**expected, "k0": "new"}
    assert {s.status for s in s3.proxy.seen} >= {0, 500, 503} and all(f.happened > 5 for f in s3.proxy.plan)
    assert len(s3.clock.waits) > 30


@pytest.mark.parametrize(
    ("fault", "path"),
    [
        (Fault("answer", status=403), ".changelog"),
        only_thorough(Fault("answer", status=403), "/manifests/"),
        only_thorough(Fault("answer"), ".changelog"),
        (Fault("answer"), "/manifests/"),
        only_thorough(Fault("drop_before"), ".changelog"),
        only_thorough(Fault("drop_before"), "/manifests/"),
    ],
)
def test_a_commit_that_fails_permanently_changes_nothing(s3: S3, tmp_path: Path, fault: Fault, path: str) -> None:
    with open_provider(s3, tmp_path / "one") as provider:
        commit(provider, 0, a="1", b="1")
        before = s3.direct().list()
        s3.plan(again(fault, 1000, "PUT", path))
        store = provider.get_store(1)
        store.put(b"a", b"2")
        with pytest.raises(StorageError, match=rf"Could not write s3://{s3.bucket}/ck/statestore/.*{path}"):
            store.commit()
        assert s3.proxy.plan[0].happened >= 1
        assert not store.has_committed and provider.latest_version() == 1
        assert content(provider, 1) == {"a": "1", "b": "1"}
        assert path != ".changelog" or s3.direct().list() == before
        with open_provider(s3, tmp_path / "two") as other:
            assert other.latest_version() == 1 and content(other, 1) == {"a": "1", "b": "1"}
        s3.plan()
        # The same store may try again, and so may a new one.
        assert (store.commit() if path == ".changelog" else commit(provider, 1, a="2")) == 2
        assert content(provider, 2) == {"a": "2", "b": "1"} and content(provider, 1) == {"a": "1", "b": "1"}
    with open_provider(s3, tmp_path / "three") as third:
        assert third.latest_version() == 2 and content(third, 2) == {"a": "2", "b": "1"}


def test_a_commit_of_unknown_outcome_leaves_one_version_or_the_other(s3: S3, tmp_path: Path) -> None:
    """The manifest is written, but no answer ever says so: the commit fails, and may be found to have succeeded."""
    with open_provider(s3, tmp_path / "one") as provider:
        commit(provider, 0, a="1")
        s3.plan(Fault("drop_after", "PUT", "/manifests/", times=1000))
        with pytest.raises(StorageError, match="tried for"):
            commit(provider, 1, a="2")
        s3.plan()
        assert provider.latest_version() == 2 and content(provider, 2) == {"a": "2"}
        assert commit(provider, 1, b="3") == 2, "the batch is run again from the version below"
        assert content(provider, 2) == {"a": "1", "b": "3"} and content(provider, 1) == {"a": "1"}
    with open_provider(s3, tmp_path / "two") as other:
        assert other.latest_version() == 2 and content(other, 2) == {"a": "1", "b": "3"}
