"""Versions of a provider: made again, read while others write, and raced for (see ``test_provider_behaviour.py``)."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreId
from backends.exceptions import (
    ConcurrentCommitError,
    InvalidStateStoreArgument,
    MissingFileError,
    StoreClosedError,
    VersionNotFoundError,
)
from tests.backends.providers.provider_cases import CONF, PROVIDERS, commit, content, shared

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def test_a_version_may_be_made_again_from_its_base(provider, location, open_provider):
    commit(provider, 0, a="1")
    commit(provider, 1, a="2", x="2")
    commit(provider, 2, a="3")
    old = provider.get_read_store(3)
    assert commit(provider, 1, a="other") == 2
    assert provider.latest_version() == 2
    assert content(provider.get_store(2)) == {"a": "other"}
    assert content(old) == {"a": "3", "x": "2"}
    with pytest.raises(VersionNotFoundError, match="0 to 2"):
        provider.get_store(3)
    with open_provider(location) as again:
        assert content(again.get_store(2)) == {"a": "other"}


def test_read_stores_stay_at_their_version_while_others_write(provider):
    stores = {0: provider.get_read_store(0)}
    for version in range(1, 6):
        commit(provider, version - 1, v=str(version))
        stores[version] = provider.get_read_store(version)
    for version, store in stores.items():
        expected = {"v": str(version)} if version else {}
        assert content(store) == expected and store.version == version
        assert content(provider.get_read_store(version)) == expected
        for change in (lambda s=store: s.put(b"a", b"1"), store.commit, lambda s=store: s.create_column_family("x")):
            with pytest.raises(StoreClosedError, match="read-only"):
                change()
    for store in stores.values():
        store.abort()


def test_readers_of_many_versions_see_each_exactly_while_a_writer_commits(provider):
    def expected(version):
        families = {
            "default": {b"all": b"%d" % version, **{b"k%d" % v: b"1" for v in range(max(version - 2, 1), version + 1)}}
        }
        return families | {f"f{v}": {b"all": b"%d" % version} for v in range(1, min(version, 3) + 1)}

    def write(version):
        store = provider.get_store(version - 1)
        if version <= 3:
            store.create_column_family(f"f{version}")
        store.remove(b"k%d" % (version - 3))
        store.put(b"k%d" % version, b"1")
        for family in expected(version):
            store.put(b"all", b"%d" % version, family)
        store.commit()

    def read(store):
        families = expected(store.version)
        for name, pairs in families.items():
            assert list(store.iterator(name)) == sorted(pairs.items())
            assert list(store.get_range(b"k", b"l", name)) == [p for p in sorted(pairs.items()) if p[0] >= b"k"]
            assert list(store.prefix_scan(b"al", name)) == [(b"all", b"%d" % store.version)]
            keys = [b"all", *(b"k%d" % v for v in range(15))]
            assert store.get_many(pa.array(keys), name).to_pylist() == [pairs.get(k) for k in keys]
        for name in {"f1", "f2", "f3"} - families.keys():
            with pytest.raises(InvalidStateStoreArgument, match=name):
                store.iterator(name)

    def keep_reading(stores):
        while not done.is_set():
            for store in stores:
                read(store)

    done = threading.Event()
    for version in range(1, 6):
        write(version)
        if version > 1:
            read(provider.get_read_store(version - 1))
    with ThreadPoolExecutor(2) as pool:
        reads = [
            pool.submit(keep_reading, [provider.get_read_store(v) for v in versions])
            for versions in ((5, 1), (4, 2, 5))
        ]
        try:
            for version in range(6, 12):
                write(version)
        finally:
            done.set()
        for each in reads:
            each.result()
    for version in (11, 3, 10):
        read(provider.get_read_store(version))


@shared
def test_a_second_commit_from_the_same_version_is_refused(provider):
    one, two = provider.get_store(0), provider.get_store(0)
    one.put(b"a", b"one")
    two.put(b"a", b"two")
    two.put(b"b", b"two")
    assert one.commit() == 1
    with pytest.raises(ConcurrentCommitError, match=r"Version 1 .* was not committed"):
        two.commit()
    assert not two.has_committed and two.get(b"a") == b"two"
    assert content(provider.get_store(1)) == {"a": "one"}


@shared
def test_of_two_providers_of_one_location_one_is_refused(provider, location, open_provider):
    commit(provider, 0, a="0")
    with open_provider(location) as other:
        mine, theirs = provider.get_store(1), other.get_store(1)
        mine.put(b"a", b"mine")
        theirs.put(b"a", b"theirs")
        assert theirs.commit() == 2
        with pytest.raises(ConcurrentCommitError, match="one writer"):
            mine.commit()
        assert content(provider.get_store(2)) == content(other.get_store(2)) == {"a": "theirs"}
        assert commit(provider, 2, a="after") == 3
        assert content(other.get_store(3)) == {"a": "after"}
    changelogs = list(Path(location).rglob("*.changelog"))
    assert len(changelogs) == 3, "the refused one is removed"


@shared
def test_racing_providers_never_mix(location, open_provider):
    providers = [open_provider(location) for _ in range(3)]
    results = []

    def work(i):
        for _ in range(10):
            version = providers[i].latest_version()
            try:
                store = providers[i].get_store(version)
                if providers[i].latest_version() != version:
                    continue  # another has made one since: this would be rolling it back
                before = int(store.get(b"n") or b"0")
                assert before == version
                store.put(b"n", str(before + 1).encode())
                results.append(store.commit())
            except ConcurrentCommitError:
                continue

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == list(range(1, len(results) + 1)), "every version was made once"
    assert content(providers[0].get_store(len(results))) == {"n": str(len(results))}
    for p in providers:
        p.close()


OTHER_PROCESS = """
import sys
from backends import StateStoreConf, StateStoreId
stores = []
for path, location in zip(sys.argv[1::2], sys.argv[2::2]):
    conf = StateStoreConf(provider=path, fsync=False)
    store = conf.provider_class()(StateStoreId(location, "op", 0), conf).get_store(1)
    store.put(b"other", b"1")
    stores.append(store)
for store in stores:
    print("opened", flush=True)
    sys.stdin.readline()
    try:
        print(store.commit(), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_of_two_processes_one_is_refused(tmp_path):
    """One process for all providers, for starting it takes longest."""
    locations = {p: str(tmp_path / p.backend) for p in PROVIDERS}
    ours = {p: p(StateStoreId(at, "op", 0), CONF) for p, at in locations.items()}
    for provider in ours.values():
        commit(provider, 0, a="0")
    args = [arg for p, at in locations.items() for arg in (f"{p.__module__}.{p.__name__}", at)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, *args], cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:

        def let_commit():
            other.stdin.write("\n")
            other.stdin.flush()
            return other.stdout.readline().strip()

        for i, provider in enumerate(ours.values()):
            store = provider.get_store(1)
            store.put(b"ours", b"1")
            assert other.stdout.readline() == "opened\n"
            if i % 2 == 0:
                assert store.commit() == 2
                assert let_commit() == "ConcurrentCommitError"
            else:
                assert let_commit() == "2"
                with pytest.raises(ConcurrentCommitError, match="was not committed"):
                    store.commit()
            assert content(provider.get_store(2)) == {"a": "0", ("ours", "other")[i % 2]: "1"}
            provider.close()
    assert other.returncode == 0


def test_two_providers_in_one_local_directory_are_refused(location, tmp_path, open_provider):
    with open_provider(location, local_dir=tmp_path / "local"), pytest.raises(ConcurrentCommitError, match="local"):
        open_provider(location, local_dir=tmp_path / "local")
    open_provider(location, local_dir=tmp_path / "local").close()


def test_a_local_directory_with_another_history_is_not_used(location, tmp_path, open_provider):
    local = tmp_path / "local"
    with open_provider(local_dir=local) as first:
        for version in range(3):
            commit(first, version, a=str(version), **{f"k{version}": "1"})
    assert local.is_dir()
    with open_provider(local_dir=local) as again:
        assert content(again.get_store(3)) == {"a": "2", "k0": "1", "k1": "1", "k2": "1"}
    with open_provider() as other:
        commit(other, 1, a="other")
        commit(other, 2, b="1")
    with open_provider(local_dir=local) as again:
        assert content(again.get_store(3)) == {"a": "other", "k0": "1", "b": "1"}
        assert commit(again, 3, c="1") == 4
    assert content(open_provider().get_store(4)) == {"a": "other", "k0": "1", "b": "1", "c": "1"}


def test_leftovers_of_a_killed_process_are_removed_from_a_local_directory(location, tmp_path, open_provider):
    with open_provider(local_dir=tmp_path / "local") as first:
        for version in range(5):
            commit(first, version, a=str(version))
        reader = first.get_read_store(1)
        assert content(reader) == {"a": "0"}
        (copy,) = (tmp_path / "local").glob("at-*")
    copy.mkdir()
    (copy / "left").write_bytes(b"behind")
    with open_provider(local_dir=tmp_path / "local"):
        assert [d.name for d in (tmp_path / "local").iterdir()] == ["current"]


def test_the_newest_manifest_that_was_removed_is_restored_from_a_copy(location, open_provider):
    with open_provider() as provider:
        for version in range(3):
            commit(provider, version, a=str(version))
        newest = max(Path(location).rglob("manifests/*.json"))
        copy = newest.read_bytes()
        newest.unlink()
        with pytest.raises(MissingFileError, match=r"Restore it from a copy") as missing:
            provider.latest_version()
        Path(str(missing.value).partition(" does not exist")[0]).write_bytes(copy)
        assert provider.latest_version() == 3
        assert content(provider.get_store(3)) == {"a": "2"}
