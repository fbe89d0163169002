"""Whatever is done to any durable file: the right content, or an error that names the file; never a wrong value."""

import os
import random
import shutil

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import DamagedFileError, LocalStateDamagedError, MissingFileError, StateStoreError
from tests.effort import IS_THOROUGH, only_thorough

pytestmark = pytest.mark.long

PROVIDERS = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}
ALL_KEPT = StateStoreConf(fsync=False, deltas_per_snapshot=3, max_versions_in_memory=0)
FEW_KEPT = StateStoreConf(fsync=False, deltas_per_snapshot=3, min_versions_to_retain=3, max_versions_in_memory=0)
LAST = 11
KINDS = ["manifest", "changelog", "snapshot", "data"]
DAMAGES = ["flip", "flip again", "cut by one", "cut in half", "emptied", "deleted", "exchanged", "of another partition"]
BLOB = random.Random(0).randbytes(100_000)


ALIKE = ("flip again", "cut by one", "emptied")
"""Damages that test the same checksum or length as others do."""


def cases(kinds):
    """Backends with the damages of their files. What providers share need not be tried with each of them every time."""
    of_rocksdb = (("data", "flip"), ("data", "exchanged"), ("snapshot", "deleted"))
    return [
        (backend, kind, how)
        for backend in PROVIDERS
        for kind in kinds
        for how in DAMAGES
        if IS_THOROUGH
        or (backend == "file" and how not in ALIKE)
        or (backend == "rocksdb" and (kind, how) in of_rocksdb)
    ]


def content_of(version):
    """What version ``version`` holds: some pairs stay, some change, some go."""
    return {
        b"v": b"%d" % version,
        b"k%d" % version: b"x" * 100,
        b"k%d" % (version - 1): b"y",
        b"blob": BLOB + b"%d" % (version // 6),
    }


def opened(backend, directory, conf, *, local=None, partition=0):
    return PROVIDERS[backend](StateStoreId(str(directory / "ck"), "op", partition), conf, local_dir=local)


def make(backend, directory, conf):
    """Two partitions with the same versions, and snapshots of some of them."""
    for partition in (0, 1):
        with opened(backend, directory, conf, local=directory / "local", partition=partition) as provider:
            for version in range(1, LAST + 1):
                store = provider.get_store(version - 1)
                for key, _ in list(store.iterator()):
                    store.remove(key)
                for key, value in content_of(version).items():
                    store.put(key, value + b"%d" % partition if key == b"v" else value)
                store.commit()
                provider.do_maintenance()


def expected(version):
    return {**content_of(version), b"v": b"%d0" % version}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directories = {}

    def get(backend, conf):
        if (backend, id(conf)) not in directories:
            directories[backend, id(conf)] = tmp_path_factory.mktemp(backend)
            make(backend, directories[backend, id(conf)], conf)
        return directories[backend, id(conf)]

    return get


def files_of_kind(directory, kind, partition=0):
    store = partition if isinstance(partition, str) else f"{partition}/default"
    root = directory / "ck" / "statestore" / "standalone" / "op" / store
    patterns = {
        "manifest": ["manifests/*.json"],
        "changelog": ["*.changelog"],
        "snapshot": ["*.snapshot"],
        "data": ["*.sst", "*.pairs"],
    }
    found = [path for pattern in patterns[kind] for path in root.glob(pattern)]
    return sorted(found, key=lambda p: (int(p.name.partition("-")[0].partition(".")[0]), p.stat().st_size, p.name))


def copied(source, directory):
    """A copy of the checkpoint that shares its files, which never change; ``damage`` makes new ones."""
    shutil.copytree(source / "ck", directory / "ck", copy_function=os.link)


def damage(victim, how, others, foreign, moments):
    good = victim.read_bytes()
    other = next(
        (o for o in (foreign if how.startswith("of") else others) if o != victim and o.read_bytes() != good), None
    )
    victim.unlink()
    if how.startswith("flip"):
        at = moments.randrange(len(good))
        victim.write_bytes(good[:at] + bytes([good[at] ^ (1 << moments.randrange(8))]) + good[at + 1 :])
    elif how == "cut by one":
        victim.write_bytes(good[:-1])
    elif how == "cut in half":
        victim.write_bytes(good[: len(good) // 2])
    elif how == "emptied":
        victim.write_bytes(b"")
    elif how != "deleted":
        shutil.copy(other, victim)


def read_all(backend, directory, conf, *, local=None, versions=range(1, LAST + 1)):
    """Per version what was found: its content, or the error."""
    try:
        provider = opened(backend, directory, conf, local=local)
    except StateStoreError as error:
        return dict.fromkeys(versions, error)
    found = {}
    with provider:
        for version in versions:
            try:
                found[version] = dict(provider.get_read_store(version).iterator())
            except StateStoreError as error:
                found[version] = error
    return found


@pytest.mark.parametrize(("backend", "kind", "how"), cases(KINDS))
def test_no_damage_gives_a_wrong_value(tmp_path, made, backend, kind, how):
    conf = FEW_KEPT
    source = made(backend, conf)
    moments = random.Random(f"{backend}{kind}{how}")
    victims = files_of_kind(source, kind)
    for number in {len(victims) // 2, len(victims) - 1}:
        directory = tmp_path / str(number)
        copied(source, directory)
        files = files_of_kind(directory, kind)
        victim = files[number]
        damage(victim, how, files, files_of_kind(directory, kind, partition=1), moments)
        found = read_all(backend, directory, conf, versions=(LAST, 8, 7, 2))
        oldest = min(int(f.name.partition("-")[0]) for f in files_of_kind(source, "snapshot"))
        for version, result in found.items():
            if not isinstance(result, StateStoreError):
                assert result == expected(version)
            elif version >= oldest:
                assert str(victim) in str(result) or (number == len(victims) - 1 and version == LAST), result


@pytest.mark.parametrize(("backend", "kind", "how"), cases(["snapshot", "data"]))
def test_a_damaged_snapshot_is_got_round_where_older_files_allow_it(tmp_path, made, backend, kind, how):
    conf = ALL_KEPT
    source = made(backend, conf)
    for victim in files_of_kind(source, kind)[-2:]:
        directory = tmp_path / victim.name
        copied(source, directory)
        files = files_of_kind(directory, kind)
        same = next(f for f in files if f.name == victim.name)
        damage(same, how, files, files_of_kind(directory, kind, partition=1), random.Random(how))
        # From above: else what is held leads on, and no snapshot is read but the first.
        assert read_all(backend, directory, conf, versions=(LAST, 8)) == {v: expected(v) for v in (LAST, 8)}


@pytest.mark.parametrize("backend", PROVIDERS)
def test_damage_of_unneeded_files_does_no_harm(tmp_path, made, backend):
    source = made(backend, ALL_KEPT)
    directory = tmp_path / "copy"
    copied(source, directory)
    for changelog in files_of_kind(directory, "changelog"):
        if int(changelog.name.partition("-")[0]) <= 9:
            changelog.unlink()
            changelog.write_bytes(b"damaged")
    with opened(backend, directory, ALL_KEPT) as provider:
        assert dict(provider.get_store(LAST).iterator()) == expected(LAST)
        with pytest.raises(DamagedFileError, match=r"/1-.*\.changelog"):
            provider.get_read_store(2)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("how", ["deleted", "cut in half"])
def test_a_snapshot_uploads_lost_files_of_an_earlier_one_again(tmp_path, backend, how):
    with opened(backend, tmp_path, ALL_KEPT) as provider:
        for version in range(1, 7):
            store = provider.get_store(version - 1)
            store.put(b"n", b"%d" % version)
            if version == 1:
                store.put(b"blob", BLOB)
            store.commit()
            provider.do_maintenance()
            if version == 3:
                files = files_of_kind(tmp_path, "data")
                damage(max(files, key=lambda f: f.stat().st_size), how, files, files, random.Random(0))
    for changelog in files_of_kind(tmp_path, "changelog"):
        changelog.unlink()
    with opened(backend, tmp_path, ALL_KEPT) as provider:
        assert dict(provider.get_read_store(6).iterator()) == {b"n": b"6", b"blob": BLOB}
        with pytest.raises((MissingFileError, DamagedFileError)):
            provider.get_read_store(3)


@pytest.fixture(scope="module")
def local(made, tmp_path_factory):
    """Of each partition, the local directory of a process that has ended."""
    directory = tmp_path_factory.mktemp("local")
    copied(made("rocksdb", ALL_KEPT), directory)
    for partition in (0, 1):
        path = directory / str(partition)
        with opened("rocksdb", directory, ALL_KEPT, local=path, partition=partition) as provider:
            for version in (LAST - 2, LAST):
                provider.get_store(version)
                provider.main.snapshots.store(None)  # makes RocksDB write its files
    return directory


def local_files(directory, pattern):
    return sorted((directory / "current/engine").glob(pattern), key=lambda f: (-f.stat().st_size, f.name))


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT"])
@pytest.mark.parametrize("how", [only_thorough(how) if how in ALIKE else how for how in DAMAGES])
def test_a_damaged_local_directory_is_rebuilt_or_named(tmp_path, local, pattern, how):
    if how == "exchanged" and pattern != "*.sst":
        pytest.skip("there is one")
    moments = random.Random(f"{pattern}{how}")
    for number in range(4 if how == "flip" else 1):
        directory = tmp_path / str(number)
        shutil.copytree(local / "0", directory)
        files = local_files(directory, pattern)
        if how.startswith("of") and pattern == "CURRENT":
            files[0].unlink()
            files[0].write_bytes(b"MANIFEST-999999\n")
        else:
            damage(files[number % len(files)], how, files, local_files(local / "1", pattern), moments)
        found = read_all("rocksdb", local, ALL_KEPT, local=directory, versions=(LAST, LAST - 4))
        for version, result in found.items():
            if isinstance(result, StateStoreError):
                assert isinstance(result, LocalStateDamagedError) and str(directory) in str(result)
            else:
                assert result == expected(version)
        if "flip" not in how:
            assert not any(isinstance(r, StateStoreError) for r in found.values())


def test_a_removed_manifest_is_noticed_by_a_reader_that_has_seen_it(tmp_path, made):
    copied(made("file", ALL_KEPT), tmp_path)
    with opened("file", tmp_path, ALL_KEPT) as provider:
        newest = files_of_kind(tmp_path, "manifest")[-1]
        newest.unlink()
        with pytest.raises(MissingFileError, match=newest.name):
            provider.latest_version()
    with opened("file", tmp_path, ALL_KEPT) as provider, pytest.raises(StateStoreError, match=newest.name):
        provider.get_store(LAST)


@pytest.mark.parametrize(("backend", "kind", "how"), cases(KINDS))
def test_local_state_is_right_whatever_happens_to_the_files(tmp_path, made, backend, kind, how):
    source = made(backend, FEW_KEPT)
    copied(source, tmp_path)
    local = tmp_path / "local"
    with opened(backend, tmp_path, FEW_KEPT, local=local) as provider:
        provider.get_store(LAST)
    files = files_of_kind(tmp_path, kind)
    damage(files[0], how, files, files_of_kind(tmp_path, kind, partition=1), random.Random(f"{kind}{how}"))
    found = read_all(backend, tmp_path, FEW_KEPT, local=local, versions=range(LAST, LAST - 4, -1))
    for version, result in found.items():
        if isinstance(result, StateStoreError):
            assert str(files[0]) in str(result)
        else:
            assert result == expected(version)
    if kind != "manifest":
        assert found[LAST] == expected(LAST)


@pytest.mark.parametrize("backend", ["file", only_thorough("rocksdb")])  # both share the code for changelogs
@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("at", [2, 4, LAST])
def test_a_damaged_changelog_spoils_only_the_versions_up_to_the_next_snapshot(tmp_path, made, backend, order, at):
    copied(made(backend, ALL_KEPT), tmp_path)
    files = files_of_kind(tmp_path, "changelog")
    damage(files[at - 1], "flip", files, files, random.Random(at))
    versions = range(1, LAST + 1) if order == "ascending" else range(LAST, 0, -1)
    found = read_all(backend, tmp_path, ALL_KEPT, versions=versions)
    spoilt = {2: {2}, 4: {4, 5}, LAST: {LAST}}[at]
    assert {version for version, result in found.items() if isinstance(result, StateStoreError)} == spoilt
    for version, result in found.items():
        if version in spoilt:
            assert isinstance(result, DamagedFileError) and str(files[at - 1]) in str(result)
        else:
            assert result == expected(version)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_store_of_the_same_partition_is_distinguished(tmp_path, kind):
    stores = {}
    for name in ("left", "right"):
        provider = FileStateStoreProvider(
            StateStoreId(str(tmp_path / "ck"), "op", 0, name), FEW_KEPT, local_dir=tmp_path / name
        )
        with provider:
            for version in range(1, 5):
                store = provider.get_store(version - 1)
                store.put(b"name", name.encode())
                store.put(b"blob", BLOB)
                store.commit()
                provider.do_maintenance()
        stores[name] = files_of_kind(tmp_path, kind, partition=f"0/{name}")
    left, right = stores["left"][-1], stores["right"][-1]
    left.unlink()
    shutil.copy(right, left)
    for changelog in files_of_kind(tmp_path, "changelog", partition="0/left") if kind in ("snapshot", "data") else ():
        changelog.unlink()
    with pytest.raises(DamagedFileError) as error:
        opened_left = FileStateStoreProvider(StateStoreId(str(tmp_path / "ck"), "op", 0, "left"), FEW_KEPT)
        dict(opened_left.get_read_store(4).iterator())
    assert str(left) in str(error.value)


@pytest.mark.parametrize(
    ("backend", "kind", "how"),
    [
        ("rocksdb", "data", "cut in half"),
        ("file", "snapshot", "cut in half"),
        only_thorough("file", "data", "deleted"),
        only_thorough("rocksdb", "snapshot", "deleted"),
        only_thorough("rocksdb", "data", "deleted"),
        only_thorough("rocksdb", "snapshot", "cut in half"),
        only_thorough("file", "snapshot", "deleted"),
        only_thorough("file", "data", "cut in half"),
    ],
)
def test_maintenance_does_not_make_damage_worse(tmp_path, made, backend, kind, how):
    copied(made(backend, FEW_KEPT), tmp_path)
    files = files_of_kind(tmp_path, kind)
    damage(files[-1], how, files, files, random.Random(0))
    kept = range(LAST, LAST - 5, -1)
    assert read_all(backend, tmp_path, FEW_KEPT, versions=kept) == {v: expected(v) for v in kept}, (
        "an older snapshot and changelogs lead there"
    )
    made_since = {}
    for last in range(LAST + 1, LAST + 7):
        with opened(backend, tmp_path, FEW_KEPT, local=tmp_path / "local") as provider:
            store = provider.get_store(last - 1)
            store.put(b"n", b"%d" % last)
            store.commit()
            made_since[last] = {**expected(LAST), b"n": b"%d" % last}
            provider.do_maintenance()
        with opened(backend, tmp_path, FEW_KEPT) as fresh:
            for version in {last, last - FEW_KEPT.min_versions_to_retain}:
                content = made_since.get(version) or expected(version)
                assert dict(fresh.get_read_store(version).iterator()) == content
