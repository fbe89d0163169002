"""Storage and providers on a real HDFS, whose processes are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import (
    DamagedFileError,
    FileExistsInStorageError,
    InvalidStateStoreArgument,
    StateStoreError,
    StorageError,
)
from backends.providers.standalone_provider import LocalStateStoreProvider
from backends.storage import hdfs_files
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.hdfs_files import HdfsClients
from backends.storage.locations import parse_location
from backends.storage.requests import BucketTraffic
from tests.patience import PATIENCE
from tests.services.hadoop import Hdfs, write_configuration

pytestmark = [pytest.mark.long, pytest.mark.service]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(hdfs: Hdfs) -> str:
    """A location of the test's own."""
    return f"{hdfs.url}/{uuid.uuid4().hex}"


def opened(
    location: str, options: Mapping[str, str] | None = None, *, retry_seconds: float = 60.0
) -> CheckpointStorage:
    """Storage that shares the pace and the usual durations of requests with no other test."""
    return CheckpointStorage.open(location, options, retry_seconds=retry_seconds, buckets=BucketTraffic())


# -- writes ----------------------------------------------------------------------------------------


def test_large_files_have_several_blocks(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs_files, "BLOCK_BYTES", 1 << 20)
    storage, content = opened(place), random.Random(0).randbytes(5 << 19)
    source = tmp_path / "source"
    source.write_bytes(content)
    file = storage.put_file("large", source)
    storage.read_to_file(file, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == storage.read(file) == content
    assert storage.get_range("large", (1 << 20) - 2, 4) == content[(1 << 20) - 2 : (1 << 20) + 2]
    for number in (1, 2):  # the second one ends with a block
        assert storage.read(storage.put_new(f"of {number} blocks", content[: number << 20])) == content[: number << 20]
    assert storage.read(storage.put_unique("unique", content)) == content


def test_a_written_file_is_synced_before_it_is_renamed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import hdfs_native

    steps: list[str] = []

    def note(owner: type, name: str) -> None:
        works = getattr(owner, name)

        async def call(*args: object) -> object:
            steps.append(name)
            return await works(*args)

        monkeypatch.setattr(owner, name, call)

    for name in ("write", "hsync", "close"):
        note(hdfs_native.AsyncFileWriter, name)
    note(hdfs_native.AsyncClient, "rename")
    opened(place).put_new("file", b"content")
    assert steps == ["write", "hsync", "close", "rename"]


def test_a_listing_of_several_requests_is_whole(hdfs: Hdfs, place: str) -> None:
    storage = opened(place)
    paths = [f"d/{number:05d}" for number in range(2100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: storage.put_new(path, b""), paths))
    assert storage.list() == [(path, 0) for path in paths]
    storage.delete_all(paths)
    assert storage.list() == []


DIES = """
import os, sys
import hdfs_native
from backends.storage.checkpoint_storage import CheckpointStorage

async def dies(*args):
    os._exit(9)

setattr(*{"write": (hdfs_native.AsyncFileWriter, "write"), "close": (hdfs_native.AsyncFileWriter, "close"),
          "rename": (hdfs_native.AsyncClient, "rename")}[sys.argv[2]], dies)
CheckpointStorage.open(sys.argv[1]).put_new("a/file", b"half")
"""


@pytest.mark.parametrize("step", ["write", "close", "rename"])
def test_a_writer_that_dies_leaves_nothing_visible(place: str, step: str) -> None:
    dead = subprocess.run([sys.executable, "-c", DIES, place, step], cwd=ROOT, check=False)
    assert dead.returncode == 9
    storage = opened(place)
    assert storage.list() == [] and not storage.exists("a/file")
    [unfinished] = storage.unfinished("a")
    assert unfinished.startswith("a/file#")
    storage.put_new("a/file", b"whole")
    storage.delete_all([unfinished])
    assert storage.unfinished("") == [] and storage.get("a/file") == b"whole"


def test_of_two_processes_that_create_a_file_one_wins(place: str) -> None:
    code = (
        "import sys\nfrom backends.exceptions import FileExistsInStorageError\n"
        "from backends.storage.checkpoint_storage import CheckpointStorage\n"
        "storage = CheckpointStorage.open(sys.argv[1])\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "for number in range(20):\n"
        "    try:\n        storage.put_new(f'race/{number}', sys.argv[2].encode())\n        print(number)\n"
        "    except FileExistsInStorageError:\n        pass\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, place, name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    won = [racer.communicate("go\n", timeout=PATIENCE)[0].split() for racer in racers]
    assert sorted(won[0] + won[1], key=int) == [str(number) for number in range(20)]
    storage = opened(place)
    assert [storage.get(f"race/{number}") for number in range(20)] == [
        b"first" if str(number) in won[0] else b"second" for number in range(20)
    ]
    assert storage.unfinished("") == []


def test_files_stay_whole_while_any_step_fails(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails before it has taken effect, or its answer is lost, as in the simulation."""
    import hdfs_native

    moments, failed = random.Random(0), [0, 0]

    def break_sometimes(owner: type, name: str) -> None:
        works = getattr(owner, name)

        async def call(*args: object, **options: object) -> object:
            fate = moments.random()
            if fate < 0.05:
                failed[0] += 1
                raise OSError("the connection broke before")
            answer = await works(*args, **options)
            if fate > 0.95:
                failed[1] += 1
                raise OSError("the connection broke after")
            return answer

        monkeypatch.setattr(owner, name, call)

    for name in ("create", "rename", "delete", "read", "get_file_info"):
        break_sometimes(hdfs_native.AsyncClient, name)
    for name in ("write", "hsync", "close"):
        break_sometimes(hdfs_native.AsyncFileWriter, name)
    storage = CheckpointStorage.open(place, sleep=lambda seconds: None, buckets=BucketTraffic())

    def write(writer: int) -> list[int]:
        won = []
        for number in range(10):
            try:
                file = storage.put_new(f"race/{number}", f"{writer} {number}".encode())
                won.append(number)
                assert storage.read(file) == f"{writer} {number}".encode()
            except FileExistsInStorageError:
                pass
            storage.replace("metadata", f"{writer} {number}".encode())
            assert storage.get("metadata").split()[0] in (b"0", b"1", b"2", b"3")
        return won

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(write, range(4)))
    assert sorted(number for of_writer in won for number in of_writer) == list(range(10)), "each has one winner"
    for writer, numbers in enumerate(won):
        assert all(storage.get(f"race/{number}") == f"{writer} {number}".encode() for number in numbers)
    assert {path for path, _ in storage.list()} == {"metadata", *(f"race/{number}" for number in range(10))}
    assert min(failed) > 3


# -- processes of HDFS that die and hang ------------------------------------------------------------


def test_writes_survive_the_death_of_the_name_node(hdfs: Hdfs, place: str) -> None:
    """Every acknowledged file is there afterwards, whole, and every writer goes on."""
    storage = opened(place)
    written: list[str] = []
    began, is_over = threading.Event(), threading.Event()

    def write(writer: int) -> None:
        number = 0
        while not is_over.is_set():
            storage.put_new(f"{writer}/{number}", f"{writer} {number}".encode() * 100)
            written.append(f"{writer}/{number}")
            number += 1
            began.set()

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, writer) for writer in range(4)]
        try:
            assert began.wait(PATIENCE)
            hdfs.name_node.kill()
            before = len(written)
            hdfs.name_node.up()
            hdfs.wait_for(2)
            storage.put_new("after", b"")
            while len(written) < before + 8:
                assert not any(writer.done() for writer in writers)
        finally:
            is_over.set()
        for writer in writers:
            writer.result(PATIENCE)
    assert {path for path, _ in storage.list()} == {*written, "after"}
    for path in written:
        assert storage.get(path) == path.replace("/", " ").encode() * 100


def test_a_name_node_that_is_down_is_named_with_the_remedy(hdfs: Hdfs, place: str) -> None:
    storage = opened(place, retry_seconds=1.0)
    storage.put_new("there", b"")
    hdfs.name_node.kill()
    try:
        for call in (storage.list, lambda: storage.get("there"), lambda: storage.put_new("new", b"")):
            with pytest.raises(StorageError, match=r"refused.*Are the NameNode and the DataNodes running"):
                call()
    finally:
        hdfs.name_node.up()
        hdfs.wait_for(2)
    assert storage.list() == [("there", 0)]


def test_a_name_node_that_hangs_hangs_nobody(hdfs: Hdfs, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened(place, retry_seconds=1.0)
    storage.put_new("there", b"content")
    monkeypatch.setattr(hdfs_files, "STEP_SECONDS", 0.5)
    hdfs.name_node.freeze()
    try:
        for call in (lambda: storage.get("there"), lambda: storage.put_new("new", b""), lambda: storage.delete("new")):
            with pytest.raises(StorageError, match=r"no answer from hdfs://.* for 0.5 s. Do they run"):
                call()
    finally:
        hdfs.name_node.thaw()
    monkeypatch.setattr(hdfs_files, "STEP_SECONDS", 15.0)
    assert opened(place).get("there") == storage.get("there") == b"content"


def test_a_rename_without_an_answer_is_recognised(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NameNode has renamed, and died before its answer: hdfs-native asks again, and the old name is gone."""
    import hdfs_native

    works, answers = hdfs_native.AsyncClient.rename, [2]

    async def twice(client: hdfs_native.AsyncClient, source: str, target: str, overwrite: bool = False) -> None:
        for _ in range(answers.pop() if answers else 1):
            await works(client, source, target, overwrite)

    monkeypatch.setattr(hdfs_native.AsyncClient, "rename", twice)
    storage = opened(place)
    storage.put_new("file", b"mine")
    assert storage.get("file") == b"mine" and storage.unfinished("") == []
    answers.append(2)
    storage.put_unique("large", bytes((8 << 20) + 1))
    assert storage.get("large") == bytes((8 << 20) + 1)
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("file", b"theirs")


def test_files_are_written_and_read_without_a_data_node(
    hdfs: Hdfs, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NameNode does not know for ten minutes that the node is dead. No write may wait for that."""
    monkeypatch.setattr(hdfs_files, "STEP_SECONDS", 3.0)
    storage = opened(place)
    before = [storage.put_new(f"before/{number}", b"content") for number in range(5)]
    hdfs.data_nodes[1].kill()
    try:
        after = [storage.put_new(f"after/{number}", b"content") for number in range(5)]
        assert [storage.read(file) for file in (*before, *after)] == [b"content"] * 10
    finally:
        hdfs.data_nodes[1].up()
        hdfs.wait_for(2)
    assert storage.unfinished("") == []
    assert {replication(hdfs, place, file.path) for file in (*before, *after)} == {2}, "the NameNode adds the others"


def replication(hdfs: Hdfs, place: str, path: str) -> int | None:
    from hdfs_native import Client

    return Client(hdfs.url).get_file_info(f"{parse_location(place).prefix.join('//')}{path}").replication


def test_damage_on_the_disk_of_a_data_node_is_found_and_got_round(hdfs: Hdfs, place: str) -> None:
    storage, content = opened(place, retry_seconds=1.0), uuid.uuid4().bytes * 1000
    file = storage.put_new("file", content)

    def damage(node: int) -> None:
        directory = Path(f"{hdfs.conf.parent}/data{node}/data")
        [block] = [p for p in directory.rglob("blk_*") if p.is_file() and p.read_bytes() == content]
        block.write_bytes(b"damage" + content[6:])

    damage(0)
    assert [storage.read(file) for _ in range(5)] == [content] * 5
    damage(1)
    with pytest.raises((StorageError, DamagedFileError), match="/file"):
        storage.read(file)


# -- addresses and users -----------------------------------------------------------------------------


def test_addresses_without_a_port(hdfs: Hdfs, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(place).put_new("file", b"content")
    directory = parse_location(place).prefix
    nameservice = {"dfs.ha.namenodes.cluster": "a,b", "dfs.namenode.rpc-address.cluster.b": hdfs.address}
    options = {**nameservice, "dfs.namenode.rpc-address.cluster.a": "127.0.0.1:1"}
    assert opened(f"hdfs://cluster/{directory}", options).get("file") == b"content"
    spark = {f"spark.hadoop.{name}": value for name, value in options.items()} | {"spark.sql.shuffle.partitions": "2"}
    assert opened(f"hdfs://cluster/{directory}", spark).get("file") == b"content"
    with pytest.raises(InvalidStateStoreArgument, match="'region' is not an option for hdfs://cluster/x"):
        opened("hdfs://cluster/x", {"region": "eu"})
    monkeypatch.setattr(hdfs_files, "DEFAULT_PORT", int(hdfs.address.rpartition(":")[2]))
    assert opened(f"hdfs://127.0.0.1/{directory}").get("file") == b"content"
    with pytest.raises(InvalidStateStoreArgument, match=r"No fs.defaultFS setting found.*HADOOP_CONF_DIR"):
        opened(f"hdfs:///{directory}")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf))
    assert opened(f"hdfs:///{directory}").get("file") == b"content"
    write_configuration(tmp_path / "core-site.xml", {"fs.defaultFS": "hdfs://cluster"})
    write_configuration(tmp_path / "hdfs-site.xml", options)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert opened(f"hdfs://cluster/{directory}").get("file") == opened(f"hdfs:/{directory}").get("file") == b"content"


def test_locations_share_a_client_that_is_never_dropped_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that Python drops while one of its threads reports a result hangs the process."""
    first, second = (opened(f"hdfs://127.0.0.1:1/{name}")._stores for name in "ab")
    assert isinstance(first, HdfsClients)
    assert isinstance(second, HdfsClients)
    client = weakref.ref(first.client)
    assert second.client is client()
    first.renew()
    assert client() is not None
    assert first.client is second.client is not client()
    monkeypatch.setenv("HADOOP_USER_NAME", "another")
    other = opened("hdfs://127.0.0.1:1/a")._stores
    assert isinstance(other, HdfsClients)
    assert other.client is not first.client


def test_of_two_name_nodes_one_that_hangs_is_left(hdfs: Hdfs, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that nobody accepts from stands for a machine that has lost its power."""
    import socket

    opened(place).put_new("file", b"content")
    monkeypatch.setattr(hdfs_files, "STEP_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        options = {
            "dfs.ha.namenodes.cluster": "a,b",
            "dfs.namenode.rpc-address.cluster.a": f"127.0.0.1:{silent.getsockname()[1]}",
            "dfs.namenode.rpc-address.cluster.b": hdfs.address,
        }
        assert opened(f"hdfs://cluster/{parse_location(place).prefix}", options).get("file") == b"content"


def test_a_user_without_rights_gets_the_remedy_at_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(place).put_new("file", b"content")
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    storage = opened(place, retry_seconds=PATIENCE)
    assert storage.get("file") == b"content"
    for call in (lambda: storage.put_new("new", b""), lambda: storage.delete("file")):
        with pytest.raises(StorageError, match=r"user=stranger, access=WRITE.*HADOOP_USER_NAME") as refused:
            call()
        assert "\tat " not in str(refused.value), "without the NameNode's stack trace"


# -- providers: crashes and damage ---------------------------------------------------------------------

KEPT = StateStoreConf(deltas_per_snapshot=3, max_versions_in_memory=0)
PROVIDERS = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}
LAST = 8


def content_of(version: int) -> dict[bytes, bytes]:
    """Return what a version holds."""
    return {b"version": b"%d" % version, b"k%d" % version: b"x" * 100, b"k%d" % (version - 1): b"y"} if version else {}


def make_version(provider: LocalStateStoreProvider, version: int) -> None:
    """Commit a version above the one before."""
    store = provider.get_store(version - 1)
    for key in content_of(version - 1):
        store.remove(key)
    for key, value in content_of(version).items():
        store.put(key, value)
    store.commit()
    provider.do_maintenance()


COMMITS = """
import sys
from backends import RocksDBStateStoreProvider, StateStoreId
from tests.backends.storage.test_hdfs import KEPT, make_version

provider = RocksDBStateStoreProvider(StateStoreId(sys.argv[1], "op", 0), KEPT)
version = provider.latest_version()
while True:
    version += 1
    make_version(provider, version)
    print(version, flush=True)
"""


def test_a_provider_killed_at_any_moment_loses_nothing_it_reported(place: str, hdfs: Hdfs) -> None:
    moments, reported = random.Random(0), 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", COMMITS, place], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first = process.stdout.readline()
        timer = threading.Timer(moments.uniform(0.0, 0.5), os.kill, (process.pid, signal.SIGKILL))
        timer.start()
        lines = [first, *process.stdout]
        timer.join()
        process.wait(PATIENCE)
        reported = int([line for line in lines if line.endswith("\n")][-1])
        with RocksDBStateStoreProvider(StateStoreId(place, "op", 0), KEPT) as provider:
            latest = provider.latest_version()
            assert reported <= latest <= reported + 1
            for version in range(max(1, latest - 3), latest + 1):
                assert dict(provider.get_read_store(version).iterator()) == content_of(version)


@pytest.fixture(scope="module", params=list(PROVIDERS))
def made(request: pytest.FixtureRequest, hdfs: Hdfs) -> tuple[str, dict[str, bytes]]:
    """The files of a provider with some versions."""
    location = f"{hdfs.url}/{uuid.uuid4().hex}"
    with PROVIDERS[request.param](StateStoreId(location, "op", 0), KEPT) as provider:
        for version in range(1, LAST + 1):
            make_version(provider, version)
    storage = opened(location)
    return request.param, {path: storage.get(path) for path, _ in storage.list()}


def damages(content: bytes) -> Iterator[bytes | None]:
    """Give what may become of a file: a flipped bit, a lost end, nothing."""
    yield bytes([content[0] ^ 1]) + content[1:]
    yield content[: len(content) // 2]
    yield None


@pytest.mark.parametrize("kind", [".json", ".changelog", ".snapshot"])
def test_no_damage_gives_a_wrong_value(
    made: tuple[str, dict[str, bytes]], hdfs: Hdfs, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend, files = made
    victim = max((path for path in files if path.endswith(kind)), key=lambda path: (len(path), path))
    location = f"{hdfs.url}/{uuid.uuid4().hex}"
    storage = opened(location)
    for path, content in files.items():
        if path != victim:
            storage.put_new(path, content)
    errors = 0
    for damaged in damages(files[victim]):
        storage.delete(victim)
        if damaged is not None:
            storage.put_new(victim, damaged)
        try:
            provider = PROVIDERS[backend](StateStoreId(location, "op", 0), KEPT)
        except StateStoreError as error:
            assert victim in str(error)
            errors += 1
            continue
        with provider:
            for version in (LAST, LAST - 1, LAST - 2):
                try:
                    assert dict(provider.get_read_store(version).iterator()) == content_of(version)
                except StateStoreError as error:
                    assert victim in str(error) or (kind == ".json" and version == LAST)
                    errors += 1
    assert errors or victim in caplog.text, "older files do without a snapshot, and a warning names it"
