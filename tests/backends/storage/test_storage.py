"""Storage: create-if-absent, checked reads, addresses and options, retries with a clock of ours."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from backends.exceptions import (
    DamagedFileError,
    FileExistsInStorageError,
    InvalidStateStoreArgument,
    MissingFileError,
    StorageError,
    UnsupportedLocationError,
)
from backends.storage import hdfs_files
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, Location, digest, parse_location, store_options
from backends.storage.requests import BucketTraffic
from tests.patience import PATIENCE


@pytest.fixture(params=["path", "file:", "memory:", pytest.param("hdfs:", marks=pytest.mark.service)])
def storage(request, tmp_path):
    if request.param == "hdfs:":
        return CheckpointStorage.open(f"{request.getfixturevalue('hdfs').url}/{uuid.uuid4().hex}/with space #1?%20")
    location = {
        "path": str(tmp_path / "new" / "state"),
        "file:": f"file://{tmp_path}/with space #1?%20",
        "memory:": f"memory://{uuid.uuid4().hex}/some/where",
    }[request.param]
    return CheckpointStorage.open(location)


def test_a_written_file_can_be_read_listed_and_deleted(storage):
    assert storage.list() == [] and not storage.exists("a/b")
    ref = storage.put_new("a/b", b"content")
    other = storage.put_new("a/c/d", b"")
    assert (ref.path, ref.size) == ("a/b", 7)
    assert storage.read(ref) == storage.get("a/b") == b"content"
    assert storage.read(other) == b""
    assert storage.exists("a/b") and not storage.exists("a")
    assert storage.list() == [("a/b", 7), ("a/c/d", 0)]
    assert storage.list("a/c/") == [("a/c/d", 0)] and storage.list("a/c/d/e") == [] and storage.list("ab") == []
    storage.delete("a/b")
    storage.delete("a/b")
    assert storage.list() == [("a/c/d", 0)]
    storage.put_new("a/e", b"")
    storage.put_new("f", b"")
    storage.delete_all(["a/b", "f", "a/c/d"])
    assert storage.list() == [("a/e", 0)]


def test_parts_end_where_the_file_ends_and_a_directory_is_not_a_file(storage, monkeypatch):
    whole = storage.put_new("a/b", b"0123456789")
    assert storage.get_range("a/b", 8, 1 << 50) == b"89"
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 3), start))
    assert storage.read(whole) == b"0123456789"
    ranges = ((0, 4), (8, 4), (10, 4), (1 << 40, 4), (3, 0))
    assert [storage.get_range("a/b", *one) for one in ranges] == [b"0123", b"89", b"", b"", b""]
    # A connection may break right behind the last byte: the rest that is read then is nothing.
    assert [b"".join(storage._files.pieces("a/b", start)) for start in (0, 4, 10)] == [b"0123456789", b"456789", b""]
    inside = FileRef("c", 5, digest(b"34567"), within="a/b", offset=3)
    behind = FileRef("d", 4, digest(b"89"), within="a/b", offset=8)
    assert storage.read_together([inside, behind]) == {"c": b"34567"}
    assert storage.read_together([FileRef("c", 5, inside.digest, within="none")]) == {}
    for path in ("a", "a/c"):
        assert storage.modified_ms(path) is None
        with pytest.raises(MissingFileError):
            storage.get(path)
        with pytest.raises(MissingFileError):
            storage.get_range(path, 0, 1)
    assert abs(storage.modified_ms("a/b") - 1000 * time.time()) < 1000 * PATIENCE


def test_listings_are_in_the_order_of_paths(storage):
    paths = ["a-b/x", "a.b", "a/b/1", "a/b/10", "a/b/9", "a/b0", "b#", "b#1x/c"]
    for path in reversed(paths):
        storage.put_new(path, b"12")
    assert storage.list() == [(path, 2) for path in paths]
    assert storage.list("a") == [(path, 2) for path in paths if path.startswith("a/")]
    assert storage.list("a", after="a/b/10") == [("a/b/9", 2), ("a/b0", 2)]


def test_files_removed_while_a_directory_is_listed_are_left_out(tmp_path, monkeypatch):
    storage = CheckpointStorage.open(str(tmp_path))
    for path in ("a/b", "c/d", "e"):
        storage.put_new(path, b"1")
    (tmp_path / "link").symlink_to("nowhere")
    scandir = os.scandir

    def removing(path):
        if str(path).endswith("/c/"):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert storage.list() == [("a/b", 1), ("e", 1)]


def test_a_writer_that_finds_a_file_taken_sees_its_final_content(tmp_path, monkeypatch):
    storage = CheckpointStorage.open(str(tmp_path), fsync=True)
    CheckpointStorage.open(str(tmp_path), fsync=False).put_new("a/x", b"1")  # its writer died before the sync
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(Path(f"/proc/self/fd/{file}").readlink()), real(file)))
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("a/x", b"2")
    assert tmp_path / "a" in synced


def test_a_file_is_never_overwritten(storage):
    storage.put_new("x", b"1")
    with pytest.raises(FileExistsInStorageError, match=r"/x exists already"):
        storage.put_new("x", b"1")
    assert storage.get("x") == b"1"


def test_a_file_of_spark_is_replaced_as_a_whole(storage):
    storage.replace("metadata", b"first")
    storage.replace("metadata", b"second")
    assert storage.get("metadata") == b"second"
    assert storage.list() == [("metadata", 6)] and storage.unfinished("") == []


def test_a_replacement_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    storage = CheckpointStorage.open(str(tmp_path))
    storage.replace("metadata", b"first")

    def dies(descriptor, data):
        raise OSError("the process dies here")

    monkeypatch.setattr("backends.storage.local_files.LocalFiles._write", staticmethod(dies))
    with pytest.raises(StorageError, match="dies here"):
        storage.replace("metadata", b"second")
    assert storage.get("metadata") == b"first"


def test_of_many_writers_one_succeeds(storage):
    barrier = threading.Barrier(8)

    def put(i):
        barrier.wait()
        try:
            storage.put_new("race/file", str(i).encode() * 1000)
            return i
        except FileExistsInStorageError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [i for i in pool.map(put, range(8)) if i is not None]
    assert len(winners) == 1
    assert storage.get("race/file") == str(winners[0]).encode() * 1000
    assert [path for path, _ in storage.list()] == ["race/file"]


def test_missing_and_damaged_files_are_named(storage):
    ref = storage.put_new("d/file", b"0123456789")
    full = f"{storage.location}/d/file"
    with pytest.raises(MissingFileError) as missing:
        storage.get("d/other")
    assert f"{storage.location}/d/other" in str(missing.value)
    for data in (b"012345678", b"0123456788", b""):
        storage.delete("d/file")
        storage.put_new("d/file", data)
        with pytest.raises(DamagedFileError) as damaged:
            storage.read(ref)
        assert full in str(damaged.value)
    storage.delete("d/file")
    with pytest.raises(MissingFileError) as missing:
        storage.read(ref)
    assert full in str(missing.value)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a"])
def test_paths_stay_below_the_location(storage, path):
    with pytest.raises(InvalidStateStoreArgument, match="not a path below"):
        storage.get(path)


def test_addresses_are_normalised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CheckpointStorage.open("ck").location == str(tmp_path / "ck")
    assert CheckpointStorage.open("file:/var/ck/").location == "/var/ck"
    assert CheckpointStorage.open("file:///var/a%20b").location == "/var/a%20b"
    assert CheckpointStorage.open("memory://n/a/").location == "memory://n/a"
    assert parse_location("s3a://bucket/a/b/").text == "s3://bucket/a/b"
    assert parse_location("abfss://c@acct.dfs.core.windows.net/p").container == "c@acct.dfs.core.windows.net"
    assert parse_location("hdfs://nn:8020/a/b/") == Location("hdfs", "hdfs://nn:8020/a/b", "nn:8020", "a/b")
    assert parse_location("hdfs:///a/b").text == parse_location("hdfs:/a/b").text == "hdfs:///a/b"
    assert CheckpointStorage.open("gs://bucket/p", {"skip_signature": "true"}).location == "gs://bucket/p"
    assert CheckpointStorage.open("ck").is_local and not CheckpointStorage.open("memory://n").is_local


def test_memory_is_shared_by_name():
    name = uuid.uuid4().hex
    CheckpointStorage.open(f"memory://{name}/a").put_new("b/c", b"1")
    assert CheckpointStorage.open(f"memory://{name}").list() == [("a/b/c", 1)]
    assert CheckpointStorage.open(f"memory://{name}x").list() == []


@pytest.mark.parametrize("location", ["webhdfs://nn/ck", "dbfs:/ck", "wasb://c@a/ck", "file://host/ck", "s3://"])
def test_other_addresses_are_refused_with_the_remedy(location):
    with pytest.raises(UnsupportedLocationError, match="state_location="):
        CheckpointStorage.open(location)


def test_hdfs_without_its_package_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    with pytest.raises(InvalidStateStoreArgument, match=r"hdfs://unused/ck needs .* 'ray-statestore\[hdfs\]'"):
        CheckpointStorage.open("hdfs://unused/ck")


def test_each_file_on_hdfs_fits_into_one_block_or_has_blocks_of_the_size_that_is_synced(monkeypatch):
    """``hsync`` concerns the block that is being written: of a file with smaller blocks, only the last one."""
    written = []

    class Writer:
        def __init__(self, block_bytes):
            self.block_bytes, self.size, self.synced = block_bytes, 0, set()

        async def write(self, piece):
            self.size += len(piece)

        async def hsync(self):
            self.synced.add((self.size - 1) // self.block_bytes)

        async def close(self):
            pass

    class Client:
        default_block_bytes = 1 << 20  # of a cluster with dfs.blocksize=1m

        async def create(self, path, options):
            written.append(Writer(options.block_size or self.default_block_bytes))
            return written[-1]

        async def rename(self, source, target, overwrite):
            pass

    options = SimpleNamespace(WriteOptions=lambda replication, block_size: SimpleNamespace(block_size=block_size))
    monkeypatch.setitem(sys.modules, "hdfs_native", options)
    monkeypatch.setattr(hdfs_files, "BLOCK_BYTES", 4 << 20)
    monkeypatch.setattr(hdfs_files, "_PIECE_BYTES", 1 << 19)
    files = hdfs_files.HdfsFiles(SimpleNamespace(client=Client(), bucket="hdfs://x"), "", fsync=True)
    for size in (1, 1 << 20, 3 << 20, 4 << 20, 9 << 20):
        files.put_new("file", bytes(size))
        assert written[-1].synced == set(range(-(-size // written[-1].block_bytes))), size


def test_sparks_s3_settings_are_taken_over():
    spark = {
        "spark.hadoop.fs.s3a.endpoint": "minio:9000",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
        "spark.hadoop.fs.s3a.access.key": "key",
        "spark.hadoop.fs.s3a.secret.key": "secret",
        "spark.hadoop.fs.s3a.session.token": "token",
        "spark.hadoop.fs.s3a.endpoint.region": "eu-central-1",
        "spark.sql.shuffle.partitions": "2",
        "spark.hadoop.fs.defaultFS": "hdfs://nn",
    }
    options = store_options(parse_location("s3a://bucket/ck"), spark)
    assert options.config == {
        "endpoint": "http://minio:9000",
        "virtual_hosted_style_request": False,
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "region": "eu-central-1",
    }
    assert options.client == {"allow_http": True}
    CheckpointStorage.open("s3a://bucket/ck", spark)


def test_s3_settings_default_as_hadoops_do():
    at = parse_location("s3a://bucket/ck")
    virtual = store_options(at, {"fs.s3a.endpoint": "s3.example.com"})
    assert virtual.config["endpoint"] == "https://bucket.s3.example.com"
    assert virtual.config["virtual_hosted_style_request"] is True and virtual.client == {}
    per_bucket = {
        "fs.s3a.access.key": "all",
        "fs.s3a.bucket.bucket.access.key": "own",
        "fs.s3a.bucket.b.access.key": "no",
    }
    assert store_options(at, per_bucket).config["access_key_id"] == "own"
    assert store_options(at, {"fs.s3a.access.key": "a", "access_key_id": "direct"}).config["access_key_id"] == "direct"
    with pytest.raises(InvalidStateStoreArgument, match=r"path\.style\.access='yes'"):
        store_options(at, {"fs.s3a.path.style.access": "yes"})
    with pytest.raises(InvalidStateStoreArgument, match="bogus"):
        CheckpointStorage.open("s3://bucket/ck", {"bogus": "1"})


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def remote(clock, retry_seconds=60.0):
    return CheckpointStorage.open(
        f"memory://{uuid.uuid4().hex}",
        clock=lambda: clock.now,
        sleep=clock.sleep,
        retry_seconds=retry_seconds,
        buckets=BucketTraffic(lambda: clock.now),
    )


def failing(monkeypatch, name, errors):
    """Makes obstore's function raise these errors, one per call, before it works again."""
    works, left = getattr(obstore, name), list(errors)

    def call(*args, **kwargs):
        if left:
            error = left.pop(0)
            if isinstance(error, tuple):
                works(*args, **kwargs)
                error = error[0]
            raise error
        return works(*args, **kwargs)

    monkeypatch.setattr(obstore, name, call)


SLOW_DOWN = GenericError("Generic S3 error: Server returned non-2xx status code: 503 Slow Down")
RESET = GenericError("Generic S3 error: HTTP error: error sending request")


def test_transient_errors_are_retried_with_growing_waits(monkeypatch):
    clock = Clock()
    storage = remote(clock)
    failing(monkeypatch, "put", [SLOW_DOWN, RESET, SLOW_DOWN])
    storage.put_new("x", b"1")
    assert len(clock.waits) == 3 and clock.waits[2] > clock.waits[0]
    assert storage.get("x") == b"1"


def test_retries_end(monkeypatch):
    clock = Clock()
    storage = remote(clock, retry_seconds=10)
    failing(monkeypatch, "get", [RESET] * 1000)
    with pytest.raises(StorageError, match=r"Could not read memory.*/x, tried for \d.*error sending request"):
        storage.get("x")
    assert 5 < clock.now <= 10


@pytest.mark.parametrize(
    "error",
    [
        PermissionDeniedError("status code: 403 Forbidden"),
        GenericError("Server returned non-2xx status code: 400 Bad Request: InvalidArgument"),
        GenericError("Received redirect without LOCATION, this normally indicates an incorrectly configured region"),
    ],
)
def test_permanent_errors_are_raised_at_once(monkeypatch, error):
    clock = Clock()
    storage = remote(clock)
    failing(monkeypatch, "put", [error])
    with pytest.raises(StorageError, match=r"Could not write memory.*/x: "):
        storage.put_new("x", b"1")
    assert clock.waits == []


def test_a_storage_that_stops_at_a_missing_file_removes_all_the_others(monkeypatch):
    storage = remote(Clock())
    for path in ("a", "b"):
        storage.put_new(path, b"1")
    failing(monkeypatch, "delete", [FileNotFoundError("Object at location x not found")])
    storage.delete_all(["x", "a", "b"])
    assert storage.list() == []


def test_a_create_whose_answer_was_lost_is_ours(monkeypatch):
    storage = remote(Clock())
    failing(monkeypatch, "put", [(RESET,)])  # written, but the answer is lost
    storage.put_new("x", b"mine")
    assert storage.get("x") == b"mine"


def test_a_retried_create_does_not_take_anothers_file_for_ours(monkeypatch):
    storage = remote(Clock())
    storage.put_new("x", b"theirs")
    failing(monkeypatch, "put", [RESET])
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("x", b"mine")


def test_a_conflict_that_leaves_no_file_is_tried_again(monkeypatch):
    storage = remote(Clock())
    failing(monkeypatch, "put", [AlreadyExistsError("status code: 409 Conflict")])
    storage.put_new("x", b"mine")
    assert storage.get("x") == b"mine"


def synced_paths(monkeypatch):
    """Return a list of the paths that are synced from now on."""
    synced = []
    real = os.fsync

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


def test_local_files_are_synced_with_all_new_directories_before_put_returns(tmp_path, monkeypatch):
    synced = synced_paths(monkeypatch)
    storage = CheckpointStorage.open(str(tmp_path / "ck" / "statestore"))
    storage.put_new("a/b/file", b"1")
    root = tmp_path / "ck" / "statestore"
    assert synced[0].name.startswith("file#")
    assert set(synced[1:]) == {root / "a" / "b", root / "a", root, tmp_path / "ck", tmp_path}
    synced.clear()
    storage.put_new("a/b/file2", b"1")
    assert synced[1:] == [root / "a" / "b"]
    synced.clear()
    CheckpointStorage.open(str(tmp_path / "other"), fsync=False).put_new("file", b"1")
    assert synced == []


def test_a_directory_that_another_process_has_made_is_synced_before_put_returns(tmp_path, monkeypatch):
    storage = CheckpointStorage.open(str(tmp_path))
    storage.put_new("a/b/file", b"1")
    (tmp_path / "a" / "c").mkdir()  # by a process that may die before it syncs the name
    synced = synced_paths(monkeypatch)
    storage.put_new("a/c/file", b"1")
    assert synced[1:] == [tmp_path / "a" / "c", tmp_path / "a"]
    synced.clear()
    storage.put_new("a/c/file2", b"1")
    assert synced[1:] == [tmp_path / "a" / "c"]


@pytest.mark.parametrize("put", ["put_new", "put_file"])
def test_a_file_whose_first_attempt_named_it_and_then_failed_is_ours(tmp_path, monkeypatch, put):
    """As on a network file system, which answers a sync of the directory by a transient error."""
    storage = CheckpointStorage.open(str(tmp_path / "state"))
    storage.put_new("a/before", b"1")
    real, failures = os.fsync, [OSError(errno.ESTALE, "Stale file handle")]

    def fsync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir() and failures:
            raise failures.pop()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "source").write_bytes(b"content")
    ref = storage.put_new("a/b", b"content") if put == "put_new" else storage.put_file("a/b", tmp_path / "source")
    assert not failures and storage.read(ref) == b"content"
    failures.append(OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("a/b", b"another writer's")
    failures.clear()
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("a/b", b"content")


PRIVATE = """
import os, sys
from pathlib import Path
from backends.storage import local_files
from backends.storage.checkpoint_storage import CheckpointStorage

os.umask(0o022)
local_files.make_process_files_private()
root = Path(sys.argv[1])
CheckpointStorage.open(str(root / "ck")).put_new("a/b/durable", b"x")
(root / "local").mkdir()
(root / "local" / "state").write_bytes(b"x")
"""


def test_durable_files_keep_their_modes_where_a_process_keeps_its_files_private(tmp_path):
    subprocess.run([sys.executable, "-c", PRIVATE, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    modes = {str(p.relative_to(tmp_path)): oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*")}
    assert modes == {
        "ck": "0o755",
        "ck/a": "0o755",
        "ck/a/b": "0o755",
        "ck/a/b/durable": "0o644",
        "local": "0o700",
        "local/state": "0o600",
    }


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path, monkeypatch):
    def write(descriptor, data):
        raise OSError(28, "No space left on device")

    storage = CheckpointStorage.open(str(tmp_path))
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError, match=r"/file: .*No space left"):
        storage.put_new("file", b"1")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_of_dead_writers_are_not_listed(tmp_path):
    storage = CheckpointStorage.open(str(tmp_path))
    storage.put_new("file", b"1")
    (tmp_path / "file#123456").write_bytes(b"half")
    assert storage.list() == [("file", 1)]


def test_a_ref_of_another_file_is_damage(tmp_path):
    storage = CheckpointStorage.open(str(tmp_path))
    one, two = storage.put_new("1", b"aaaa"), storage.put_new("2", b"bbbb")
    with pytest.raises(DamagedFileError, match="/2 is damaged"):
        storage.read(FileRef(two.path, one.size, one.digest))
