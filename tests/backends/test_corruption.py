"""Whatever is done to any durable file: the right content, or an error that names the file; never a wrong value."""

import random
import shutil

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import DamagedFileError, LocalStateDamagedError, MissingFileError, StateStoreError

PROVIDERS = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}
ALL_KEPT = StateStoreConf(fsync=False, deltas_per_snapshot=3, max_versions_in_memory=0)
FEW_KEPT = StateStoreConf(fsync=False, deltas_per_snapshot=3, min_versions_to_retain=3, max_versions_in_memory=0)
LAST = 11
KINDS = ["manifest", "changelog", "snapshot", "data"]
DAMAGES = ["flip", "flip again", "cut by one", "cut in half", "emptied", "deleted", "exchanged", "of another partition"]
BLOB = random.Random(0).randbytes(100_000)


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
    root = directory / "ck" / "statestore" / "standalone" / "op" / str(partition) / "default"
    patterns = {
        "manifest": ["manifests/*.json"],
        "changelog": ["*.changelog"],
        "snapshot": ["*.snapshot"],
        "data": ["*.sst", "*.pairs"],
    }
    found = [path for pattern in patterns[kind] for path in root.glob(pattern)]
    return sorted(found, key=lambda p: (int(p.name.partition("-")[0].partition(".")[0]), p.stat().st_size, p.name))


def damage(victim, how, others, foreign, moments):
    good = victim.read_bytes()
    if how.startswith("flip"):
        at = moments.randrange(len(good))
        victim.write_bytes(good[:at] + bytes([good[at] ^ (1 << moments.randrange(8))]) + good[at + 1 :])
    elif how == "cut by one":
        victim.write_bytes(good[:-1])
    elif how == "cut in half":
        victim.write_bytes(good[: len(good) // 2])
    elif how == "emptied":
        victim.write_bytes(b"")
    elif how == "deleted":
        victim.unlink()
    elif how == "exchanged":
        other = next(o for o in others if o != victim and o.read_bytes() != good)
        shutil.copy(other, victim)
    else:
        shutil.copy(next(f for f in foreign if f.read_bytes() != good), victim)


def read_all(backend, directory, conf, *, local=None):
    """Per version what was found: its content, or the error."""
    try:
        provider = opened(backend, directory, conf, local=local)
    except StateStoreError as error:
        return dict.fromkeys(range(1, LAST + 1), error)
    found = {}
    with provider:
        for version in range(1, LAST + 1):
            try:
                found[version] = dict(provider.get_read_store(version).iterator())
            except StateStoreError as error:
                found[version] = error
    return found


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", DAMAGES)
def test_no_damage_gives_a_wrong_value(tmp_path, made, backend, kind, how):
    conf = FEW_KEPT
    source = made(backend, conf)
    moments = random.Random(f"{backend}{kind}{how}")
    victims = files_of_kind(source, kind)
    for number in {0, len(victims) // 2, len(victims) - 1}:
        directory = tmp_path / str(number)
        shutil.copytree(source / "ck", directory / "ck")
        files = files_of_kind(directory, kind)
        victim = files[number]
        damage(victim, how, files, files_of_kind(directory, kind, partition=1), moments)
        found = read_all(backend, directory, conf)
        oldest = min(int(f.name.partition("-")[0]) for f in files_of_kind(source, "snapshot"))
        for version, result in found.items():
            if not isinstance(result, StateStoreError):
                assert result == expected(version)
            elif version >= oldest:
                assert str(victim) in str(result) or (number == len(victims) - 1 and version == LAST), result


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("kind", ["snapshot", "data"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_snapshot_is_got_round_where_older_files_allow_it(tmp_path, made, backend, kind, how):
    conf = ALL_KEPT
    source = made(backend, conf)
    for victim in files_of_kind(source, kind)[-2:]:
        directory = tmp_path / victim.name
        shutil.copytree(source / "ck", directory / "ck")
        files = files_of_kind(directory, kind)
        same = next(f for f in files if f.name == victim.name)
        damage(same, how, files, files_of_kind(directory, kind, partition=1), random.Random(how))
        assert read_all(backend, directory, conf) == {v: expected(v) for v in range(1, LAST + 1)}


@pytest.mark.parametrize("backend", PROVIDERS)
def test_damage_of_what_is_not_needed_does_no_harm(tmp_path, made, backend):
    source = made(backend, ALL_KEPT)
    directory = tmp_path / "copy"
    shutil.copytree(source / "ck", directory / "ck")
    for changelog in files_of_kind(directory, "changelog"):
        if int(changelog.name.partition("-")[0]) <= 9:
            changelog.write_bytes(b"damaged")
    with opened(backend, directory, ALL_KEPT) as provider:
        assert dict(provider.get_store(LAST).iterator()) == expected(LAST)
        with pytest.raises(DamagedFileError, match=r"/1-.*\.changelog"):
            provider.get_read_store(2)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("how", ["deleted", "cut in half"])
def test_a_snapshot_uploads_again_what_an_earlier_one_has_lost(tmp_path, backend, how):
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


@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT"])
@pytest.mark.parametrize("how", ["flip", "cut in half", "emptied", "deleted"])
def test_a_damaged_local_directory_is_made_anew_or_named(tmp_path, made, pattern, how):
    source = made("rocksdb", ALL_KEPT)
    for seed in range(4):
        directory = tmp_path / str(seed)
        shutil.copytree(source / "ck", directory / "ck")
        with opened("rocksdb", directory, ALL_KEPT, local=directory / "local") as provider:
            provider.get_store(LAST)
            provider._main.snapshot(None)  # makes RocksDB write its files
        files = sorted((directory / "local/current/engine").glob(pattern), key=lambda f: f.stat().st_size)
        damage(files[-1], how, files, files, random.Random(seed))
        found = read_all("rocksdb", directory, ALL_KEPT, local=directory / "local")
        for version, result in found.items():
            if isinstance(result, StateStoreError):
                assert isinstance(result, LocalStateDamagedError) and str(directory / "local") in str(result)
            else:
                assert result == expected(version)
        if how != "flip":
            assert not any(isinstance(r, StateStoreError) for r in found.values())


def test_a_removed_manifest_is_noticed_by_who_has_seen_it(tmp_path, made):
    shutil.copytree(made("file", ALL_KEPT) / "ck", tmp_path / "ck")
    with opened("file", tmp_path, ALL_KEPT) as provider:
        newest = files_of_kind(tmp_path, "manifest")[-1]
        newest.unlink()
        with pytest.raises(MissingFileError, match=newest.name):
            provider.latest_version()
    with opened("file", tmp_path, ALL_KEPT) as provider, pytest.raises(StateStoreError, match=newest.name):
        provider.get_store(LAST)
