"""What maintenance uploads, keeps and removes (see ``test_provider_behaviour.py``)."""

import os
import threading
from pathlib import Path

import pytest

from backends import (
    FileStateStoreProvider,
    StateStoreConf,
    StateStoreId,
)
from backends.exceptions import (
    InvalidStateStoreArgument,
    VersionNotFoundError,
)
from tests.backends.providers.provider_cases import CONF, PROVIDERS, SOON, changes, commit, content, files, shared
from tests.backends.providers.third_provider import ThirdStateStoreProvider
from tests.patience import HANG, PATIENCE

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def test_a_snapshot_is_taken_when_it_is_due(open_provider, location):
    provider = open_provider(conf=SOON)
    provider.do_maintenance()
    for version in range(7):
        commit(provider, version, **{f"k{version}": "v"})
        provider.do_maintenance()
    assert files(location, "snapshot") == [3, 6]
    # What a snapshot covers is not read again.
    for changelog in Path(location).rglob("*.changelog"):
        if int(changelog.name.partition("-")[0]) <= 6:
            changelog.unlink()
    fresh = open_provider(conf=SOON)
    assert content(fresh.get_store(7)) == {f"k{v}": "v" for v in range(7)}
    assert fresh.get_store(7).metrics.num_keys == 7


@shared
def test_maintenance_keeps_what_it_should_and_removes_the_rest(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(20):
        commit(provider, version, **{f"k{version % 5}": str(version)})
        provider.do_maintenance()
    # Of version 20, four and the base of an uncommitted batch: from 15 on, which is a snapshot's version.
    assert files(location, "changelog") == [16, 17, 18, 19, 20] and files(location, "snapshot") == [15, 18]
    assert len(list(Path(location).rglob("*.json"))) <= 8
    for one in (provider, open_provider(conf=SOON)):
        for version in range(15, 21):
            last = {f"k{v % 5}": str(v) for v in range(version)}
            assert content(one.get_read_store(version)) == last
        for version in (1, 14):
            for open_store in (one.get_store, one.get_read_store):
                with pytest.raises(VersionNotFoundError, match=r"versions 15 to 20 .*min_versions_to_retain"):
                    open_store(version)
        assert content(one.get_store(0)) == {}
        with pytest.raises(VersionNotFoundError, match="no longer kept"):
            one.change_feed(0, 16)
        assert changes(one, 15, 16) == [(16, "default", b"k0", b"10", b"15")]


def test_an_open_read_store_keeps_its_version(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(4):
        commit(provider, version, a=str(version))
    provider.do_maintenance()
    reader = provider.get_read_store(4)
    for version in range(4, 20):
        commit(provider, version, a=str(version))
        provider.do_maintenance()
    assert min(files(location, "snapshot")) == 4
    assert content(reader) == {"a": "3"}
    reader.abort()
    commit(provider, 20, a="20")
    provider.do_maintenance()
    assert min(files(location, "snapshot")) > 4


def test_an_open_read_store_keeps_a_version_that_was_rolled_back(open_provider):
    provider = open_provider(conf=SOON)
    for version in range(4):
        commit(provider, version, a=str(version))
    reader = provider.get_read_store(4)
    for version in range(1, 16):
        commit(provider, version, a="other")
        provider.do_maintenance()
    assert content(reader) == {"a": "3"}


@shared
def test_going_back_after_maintenance(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(20):
        commit(provider, version, **{f"k{version}": "v"})
        provider.do_maintenance()
    assert commit(provider, 16, other="1") == 17
    for version in range(17, 23):
        expected = {**{f"k{v}": "v" for v in range(16)}, "other": str(version - 16)}
        assert content(open_provider(conf=SOON).get_store(version)) == expected
        commit(provider, version, other=str(version - 15))
        provider.do_maintenance()
        with pytest.raises(VersionNotFoundError, match="no longer kept"):
            provider.get_read_store(14)
    assert commit(provider, 0, fresh="1") == 1
    provider.do_maintenance()
    assert content(open_provider(conf=SOON).get_store(1)) == {"fresh": "1"}
    assert provider.latest_version() == 1


@shared
def test_litter_is_removed_when_its_version_is_no_longer_kept(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a="1")
    directory = next(Path(location).rglob("*.changelog")).parent
    for name in ("3-dead.changelog", "3-dead.sst", "3-dead.snapshot", "12-running.changelog"):
        (directory / name).write_bytes(b"what an attempt left that died")
    for version in range(3, 11):
        provider.do_maintenance()
        commit(provider, version, a="1")
    provider.do_maintenance()
    assert not list(directory.glob("3-dead.*")) and (directory / "12-running.changelog").exists()


def test_commits_and_reads_succeed_while_a_snapshot_is_uploaded(open_provider, location, monkeypatch):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a=str(version))
    uploading, go = threading.Event(), threading.Event()
    monkeypatch.setattr(
        "backends.fault_points._hook",
        lambda p: (uploading.set(), go.wait(HANG)) if p == "snapshot:descriptor" else None,
    )
    maintenance = threading.Thread(target=provider.do_maintenance)
    maintenance.start()
    assert uploading.wait(PATIENCE)
    for version in range(3, 9):
        commit(provider, version, a=str(version))
        assert content(provider.get_read_store(version + 1)) == {"a": str(version)}
    assert maintenance.is_alive()
    go.set()
    maintenance.join(PATIENCE)
    provider.do_maintenance()
    fresh = open_provider(conf=SOON)
    assert content(fresh.get_store(9)) == {"a": "8"} and content(fresh.get_read_store(3)) == {"a": "2"}
    # Only the manifest of a later version names the snapshot; going back must not lose it.
    assert commit(provider, 5, a="other") == 6
    for changelog in Path(location).rglob("*.changelog"):
        if int(changelog.name.partition("-")[0]) <= 3:
            changelog.unlink()
    assert content(open_provider(conf=SOON).get_store(6)) == {"a": "other"}


def test_a_snapshot_uploads_only_what_is_new(open_provider, location):
    """The values are random, so that an upload is about as large as the state it has."""
    conf = StateStoreConf(fsync=False, deltas_per_snapshot=1, file_snapshot_part_bytes=4 << 10)
    provider = open_provider(conf=conf)
    store = provider.get_store(0)
    for i in range(500):
        store.put(b"%04d" % i, os.urandom(320))
    store.commit()
    provider.do_maintenance()
    first = provider.get_read_store(1).metrics.custom["snapshot_bytes_written"]
    commit(provider, 1, zzz="1")
    provider.do_maintenance()
    second = provider.get_read_store(2).metrics.custom["snapshot_bytes_written"] - first
    assert first > 150_000
    if provider.backend == "rocksdb":
        assert second < first / 10
    assert len(list(open_provider(conf=conf).get_read_store(2).iterator())) == 501


def test_backends_are_not_mixed_up(provider_class, open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a=str(version))
    provider.do_maintenance()
    other = next(p for p in PROVIDERS if p is not provider_class)
    said = f"written by the provider '{provider.backend}'"
    with other(StateStoreId(location, "op", 0), SOON) as wrong, pytest.raises(InvalidStateStoreArgument, match=said):
        wrong.get_store(3)
    provider.close()
    with provider_class(StateStoreId(location, "op", 0), SOON) as chosen:
        assert content(chosen.get_store(3)) == {"a": "2"}
    with other(StateStoreId(f"{location}-2", "op", 0), SOON) as new:
        assert commit(new, 0, a="1") == 1


def test_without_a_snapshot_another_backend_continues(provider_class, provider, location):
    """Changelogs are the same for all."""
    commit(provider, 0, a="1", b="1")
    provider.close()
    other = next(p for p in PROVIDERS if p is not provider_class)
    with other(StateStoreId(location, "op", 0), CONF) as second:
        assert content(second.get_store(1)) == {"a": "1", "b": "1"}
        assert commit(second, 1, a="2") == 2
    with provider_class(StateStoreId(location, "op", 0), CONF) as third:
        assert content(third.get_store(2)) == {"a": "2", "b": "1"}


def test_a_provider_is_named_by_its_import_path(location):
    conf = StateStoreConf(provider="tests.backends.providers.third_provider.ThirdStateStoreProvider")
    assert conf.provider_class() is ThirdStateStoreProvider
    assert StateStoreConf(provider="file").provider_class() is FileStateStoreProvider
    # As manifests may name it that were written before the modules moved:
    assert StateStoreConf(provider="backends.file.FileStateStoreProvider").provider_class() is FileStateStoreProvider
    moved = "backends.providers.file.FileStateStoreProvider"
    assert StateStoreConf(provider=moved).provider_class() is FileStateStoreProvider
    for wrong in (
        "no.such.module.Class",
        "backends.engines.sorted_map_engine.NoSuchClass",
        "backends.engines.sorted_map_engine.lists_of",
    ):
        with pytest.raises(InvalidStateStoreArgument, match="cannot be imported"):
            StateStoreConf(provider=wrong).provider_class()
    with pytest.raises(InvalidStateStoreArgument, match="choose one of rocksdb, file"):
        StateStoreConf(provider="hdfs")
