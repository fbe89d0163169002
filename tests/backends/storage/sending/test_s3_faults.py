"""Storage and a provider on a real S3-protocol server, also while the network and the service fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import (
    DamagedFileError,
    FileExistsInStorageError,
    MissingFileError,
    StorageError,
    UnsupportedLocationError,
)
from backends.storage.checkpoint_storage import CheckpointStorage, digest
from backends.storage.create_if_absent import CREATE_PROBE, CreateIfAbsentProofs
from backends.storage.file_ref import FileRef
from backends.storage.sending.traffic import BucketTraffic
from tests.backends.storage.s3_faults import Fault, FaultProxy, Kind, S3Server
from tests.effort import only_thorough

pytestmark = pytest.mark.long


@dataclass
class Clock:
    """A clock that only sleeping moves, and that does so at once."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@dataclass
class S3:
    """A bucket of the test's own, and the ways to it: ``open`` through the proxy, ``direct`` past it."""

    server: S3Server
    proxy: FaultProxy
    bucket: str
    clock: Clock

    def open(self, location: str = "", *, retry_seconds: float = 10.0, **settings: str) -> CheckpointStorage:
        return self._open(self.proxy.endpoint, location, retry_seconds, settings)

    def direct(self) -> CheckpointStorage:
        return self._open(self.server.endpoint, "", 0.0, {})

    def options(self, endpoint: str, settings: dict[str, str] | None = None) -> dict[str, str]:
        """Spark's settings, as a user gives them."""
        options = {
            "endpoint": endpoint,
            "path.style.access": "true",
            "access.key": self.server.account.access_key,
            "secret.key": self.server.account.secret_key,
            **{name.replace("_", "."): value for name, value in (settings or {}).items()},
        }
        return {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}

    def _open(self, endpoint: str, location: str, retry_seconds: float, settings: dict[str, str]) -> CheckpointStorage:
        return CheckpointStorage.open(
            location or f"s3a://{self.bucket}/dir",
            self.options(endpoint, settings),
            clock=lambda: self.clock.now,
            sleep=self.clock.sleep,
            retry_seconds=retry_seconds,
            buckets=BucketTraffic(lambda: self.clock.now),
        )

    def plan(self, *faults: Fault) -> None:
        """What goes wrong from now on, and count requests anew. A minute has passed: nothing is held back."""
        self.clock.now += 60
        self.proxy.plan = list(faults)
        self.proxy.seen = []
        self.clock.waits = []


@pytest.fixture
def s3(
    servers: tuple[S3Server, FaultProxy], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3]:
    server, proxy = servers
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    bucket = f"bucket-{time.time_ns()}"
    server.make_bucket(bucket)
    made = S3(server, proxy, bucket, Clock())
    made.plan()
    yield made
    made.plan()


def calls_on(storage: CheckpointStorage) -> dict[str, Callable[[], object]]:
    """Every way to reach the storage, each on the file 'there' that has the content b'content'."""
    return {
        "put_new": lambda: storage.put_new("new", b"content"),
        "get": lambda: storage.get("there"),
        "read": lambda: storage.read(FileRef("there", 7, digest(b"content"))),
        "get_range": lambda: storage.get_range("there", 2, 3),
        "read a part": lambda: storage.read(FileRef("part", 3, digest(b"nte"), "there", 2)),
        "read_together": lambda: storage.read_together([FileRef("part", 3, digest(b"nte"), "there", 2)]),
        "exists": lambda: storage.exists("there"),
        "list": storage.list,
        "delete": lambda: storage.delete("there"),
        "delete_all": lambda: storage.delete_all(["there", "not there"]),
    }


# -- what works ----------------------------------------------------------------------------------


def test_what_is_put_can_be_read_listed_and_deleted(s3: S3) -> None:
    storage = s3.open()
    assert storage.location == f"s3://{s3.bucket}/dir" and not storage.is_local
    assert storage.list() == [] and not storage.exists("a/b")
    ref = storage.put_new("a/b", b"content")
    other = storage.put_new("a/c/d", b"")
    odd = storage.put_new("with space/ü+%20&=#?", b"odd")
    assert storage.read(ref) == storage.get("a/b") == b"content"
    assert storage.read(other) == b"" and storage.read(odd) == b"odd"
    assert storage.exists("a/b") and not storage.exists("a")
    assert storage.list() == [("a/b", 7), ("a/c/d", 0), ("with space/ü+%20&=#?", 3)]
    assert storage.list("a/c/") == [("a/c/d", 0)] and storage.list("a/c/d/e") == [] and storage.list("ab") == []
    storage.delete("a/b")
    storage.delete("a/b")
    storage.delete("with space/ü+%20&=#?")
    assert storage.list() == [("a/c/d", 0)]
    # A location is a directory: another that begins with its name is no part of it.
    s3.server.overwrite(s3.bucket, "directory/x", b"1")
    assert storage.list() == [("a/c/d", 0)]
    assert s3.open(f"s3a://{s3.bucket}").list() == [("dir/a/c/d", 0), ("directory/x", 1)]
    assert s3.clock.waits == []


def test_many_files_are_removed_with_one_request_for_a_thousand(s3: S3) -> None:
    storage = s3.open()
    paths = [f"many/{i:04d}" for i in range(1001)]
    s3.server.fill(s3.bucket, [f"dir/{path}" for path in [*paths, "stays"]])
    storage.delete_all([*paths, "was never there"])
    assert storage.list() == [("stays", 1)]
    assert s3.proxy.count("POST") == 2
    s3.plan()
    storage.delete_all([])
    assert not s3.proxy.seen


@pytest.mark.parametrize(("status", "is_removed"), [(403, False), (500, True), (503, True)])
def test_a_file_that_a_bulk_removal_refuses_is_removed_later_or_is_an_error(
    s3: S3, status: int, is_removed: bool
) -> None:
    for name in ("first", "second"):
        s3.direct().put_new(name, b"content")
    s3.plan(Fault("refuse", status=status))
    if is_removed:
        s3.open().delete_all(["first", "second"])
        assert s3.direct().list() == [] and len(s3.clock.waits) == 1
    else:
        with pytest.raises(StorageError, match=r"first and 1 other files: .*code: AccessDenied") as failed:
            s3.open().delete_all(["first", "second"])
        assert "tried for" not in str(failed.value)
        assert s3.direct().list() == [("first", 7)] and s3.clock.waits == []


def test_credentials_are_those_of_the_settings(s3: S3) -> None:
    storage = s3.open()
    with s3.server.checking_credentials():
        ref = storage.put_new("a", b"content")
        assert storage.read(ref) == b"content" and storage.exists("a") and storage.list() == [("a", 7)]
        storage.delete("a")
        assert storage.list() == []


def test_a_list_of_more_than_one_page_is_whole(s3: S3) -> None:
    names = [f"f{i:04}" for i in range(1001)]
    s3.server.fill(s3.bucket, [f"dir/{name}" for name in names])
    listing = [(name, 1) for name in names]
    s3.plan(Fault("answer", "GET", "continuation-token"), Fault("drop_after", "GET", "continuation-token"))
    assert s3.open().list() == listing
    assert [s.status for s in s3.proxy.seen] == [200, 503, 200, 0, 200, 200]


def test_a_file_is_never_overwritten(s3: S3) -> None:
    storage = s3.open()
    storage.put_new("x", b"1")
    for data in (b"1", b"2", b""):
        with pytest.raises(FileExistsInStorageError, match=rf"s3://{s3.bucket}/dir/x exists already"):
            storage.put_new("x", data)
    assert storage.get("x") == b"1" and s3.clock.waits == []


@pytest.mark.parametrize("faulty", [only_thorough(False), True])
def test_of_many_writers_one_succeeds(s3: S3, faulty: bool) -> None:
    if faulty:
        # The first answers are lost, so the winner meets its own file. Delays let others come between.
        s3.plan(Fault("drop_after", "PUT", times=3), Fault("delay", "PUT", seconds=0.05, times=20))
    barrier = threading.Barrier(8)

    def put(i: int) -> int | None:
        storage = s3.open()
        barrier.wait()
        try:
            storage.put_new("race/file", str(i).encode() * 1000)
        except FileExistsInStorageError:
            return None
        return i

    with ThreadPoolExecutor(8) as pool:
        winners = [i for i in pool.map(put, range(8)) if i is not None]
    assert len(winners) == 1
    assert s3.direct().get("race/file") == str(winners[0]).encode() * 1000
    assert s3.direct().list() == [("race/file", 1000)]
    assert len([s for s in s3.proxy.seen if s.method == "PUT" and s.status == 0]) == (3 if faulty else 0)


def test_missing_and_damaged_files_are_named(s3: S3, tmp_path: Path) -> None:
    storage = s3.open()
    ref = storage.put_new("d/file", b"0123456789")
    full = f"s3://{s3.bucket}/dir/d/file"
    for data in (b"012345678", b"0123456788", b""):
        s3.server.overwrite(s3.bucket, "dir/d/file", data)
        for read in (storage.read, lambda r: storage.read_to_file(r, tmp_path / "copy")):
            with pytest.raises(DamagedFileError, match=f"{full} is damaged: {len(data)} bytes"):
                read(ref)
    storage.delete("d/file")
    for read in (storage.read, lambda r: storage.read_to_file(r, tmp_path / "copy"), lambda r: storage.get(r.path)):
        with pytest.raises(MissingFileError, match=f"{full} .*does not exist"):
            read(ref)
    assert s3.clock.waits == []


# -- what can never work is said at once ---------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"access_key": "AKIANOBODY"}, "InvalidAccessKeyId"), ({"secret_key": "wrong"}, "SignatureDoesNotMatch")],
)
def test_wrong_credentials_fail_at_once(s3: S3, settings: dict[str, str], reason: str) -> None:
    s3.direct().put_new("there", b"content")
    storage = s3.open(**settings)  # type: ignore[arg-type]
    with s3.server.checking_credentials():
        for name, call in calls_on(storage).items():
            s3.plan()
            with pytest.raises(StorageError) as failed:
                call()
            assert f"s3://{s3.bucket}/dir/" in str(failed.value)
            # The answer to HEAD has no body that could say more.
            assert ("403" if name == "exists" else reason) in str(failed.value)
            assert len(s3.proxy.seen) == 1 and s3.clock.waits == []
    assert s3.direct().list() == [("there", 7)]


def test_a_bucket_that_does_not_exist_fails_at_once(s3: S3, tmp_path: Path) -> None:
    storage = s3.open("s3a://no-such-bucket/dir")
    calls = calls_on(storage)
    # HEAD says 404 without a body, be it the file or the bucket that is missing.
    assert calls.pop("exists")() is False
    calls["read_to_file"] = lambda: storage.read_to_file(FileRef("there", 7, ""), tmp_path / "copy")
    for call in calls.values():
        s3.plan()
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/dir/.*: NoSuchBucket$") as failed:
            call()
        assert not isinstance(failed.value, MissingFileError)
        assert len(s3.proxy.seen) == 1 and s3.clock.waits == []


def test_what_is_forbidden_is_not_retried(s3: S3) -> None:
    s3.direct().put_new("there", b"content")
    for name, call in calls_on(s3.open()).items():
        s3.plan(Fault("answer", status=403, times=100))
        with pytest.raises(StorageError, match=rf"s3://{s3.bucket}/dir/") as failed:
            call()
        assert "tried for" not in str(failed.value)
        assert len(s3.proxy.seen) == 1 and s3.clock.waits == [], name
    assert s3.direct().list() == [("there", 7)]


def test_settings_are_not_mixed_with_the_environments(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIANOBODY",
        "AWS_SECRET_ACCESS_KEY": "wrong",
        "AWS_SESSION_TOKEN": "of other keys",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_CONDITIONAL_PUT": "disabled",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_REGION": "eu-north-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }.items():
        monkeypatch.setenv(name, value)
    storage = s3.open()
    with s3.server.checking_credentials():
        storage.put_new("x", b"1")
        with pytest.raises(FileExistsInStorageError):
            storage.put_new("x", b"1")
        assert storage.list() == [("x", 1)]
    assert len(s3.proxy.seen) == 4
    assert not any("x-amz-security-token" in seen.headers for seen in s3.proxy.seen)
    assert all("/us-east-1/s3/" in seen.headers["authorization"] for seen in s3.proxy.seen)


def test_a_session_token_that_is_given_is_sent(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    s3.open(session_token="ours").list()
    assert [seen.headers["x-amz-security-token"] for seen in s3.proxy.seen] == ["ours"]


# -- what passes is retried ----------------------------------------------------------------------

TRANSIENT = {
    "503": Fault("answer", status=503),
    "500": Fault("answer", status=500),
    "400 RequestTimeout": Fault("answer", status=400),
    "broken before": Fault("drop_before"),
    "broken after": Fault("drop_after"),
    "500 after": Fault("answer_after", status=500),
}


def again(fault: Fault, times: int, method: str = "", path: str = "") -> Fault:
    """A fresh copy of a fault."""
    return Fault(fault.kind, method, path, fault.status, times)


@pytest.mark.parametrize("kind", [only_thorough(kind) if kind == "500" else kind for kind in TRANSIENT])
def test_transient_errors_are_retried_with_growing_waits(s3: S3, kind: str) -> None:
    direct = s3.direct()
    direct.put_new("there", b"content")
    expected = {"get": b"content", "read": b"content", "exists": True, "list": [("there", 7)]}
    expected |= {"get_range": b"nte", "read a part": b"nte", "read_together": {"part": b"nte"}}
    calls = calls_on(s3.open())
    if kind == "400 RequestTimeout":
        del calls["exists"]  # the answer to HEAD has no body, which alone tells a late request from other errors

    def check(name: str, answer: object) -> None:
        s3.plan(again(TRANSIENT[kind], 4))
        assert calls[name]() == answer
        assert [f.happened for f in s3.proxy.plan] == [4], name
        # Each wait is between a half and all of 0.1 s, 0.2 s, 0.4 s, 0.8 s.
        assert len(s3.clock.waits) == 4
        assert all(0.05 * 2**i <= wait <= 0.1 * 2**i for i, wait in enumerate(s3.clock.waits))

    for name in calls.keys() & expected.keys():
        check(name, expected[name])
    check("put_new", FileRef("new", 7, digest(b"content")))
    assert direct.list() == [("new", 7), ("there", 7)]
    for name in ("delete", "delete_all"):
        check(name, None)
        assert direct.list() == [("new", 7)]
        direct.put_new("there", b"content")


@pytest.mark.parametrize("kind", ["503", "broken before"])
def test_retries_end_and_say_how_long_they_took(s3: S3, kind: str) -> None:
    s3.direct().put_new("there", b"content")
    for name, call in calls_on(s3.open(retry_seconds=20)).items():
        s3.plan(again(TRANSIENT[kind], 1000))
        started = s3.clock.now
        with pytest.raises(StorageError, match=rf"s3://{s3.bucket}/dir/.*, tried for \d+\.\d s: ") as failed:
            call()
        took = s3.clock.now - started
        assert not isinstance(failed.value, MissingFileError | FileExistsInStorageError)
        assert f"tried for {took:.1f} s" in str(failed.value)
        assert 14 < took <= 20 and max(s3.clock.waits) <= 5
        assert len(s3.proxy.seen) == len(s3.clock.waits) + 1, name
    assert s3.direct().list() == [("there", 7)], "nothing was half done"


def test_retries_end_in_real_time(s3: S3) -> None:
    s3.plan(Fault("answer", times=1000))
    storage = s3.open(retry_seconds=0.5)
    storage._sender._clock, storage._sender._sleep = time.monotonic, time.sleep
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"tried for \d\.\d s: .*503.*: SlowDown$"):
        storage.put_new("x", b"1")
    assert 0.1 < time.monotonic() - started < 5
    assert s3.direct().list() == []


@pytest.mark.parametrize("keep", [0, only_thorough(1), 50_000])
def test_a_body_that_was_cut_short_is_read_again(s3: S3, tmp_path: Path, keep: int) -> None:
    storage = s3.open()
    data = os.urandom(100_000)
    ref = storage.put_new("x", data)

    def through_file() -> bytes:
        storage.read_to_file(ref, tmp_path / "copy")
        return (tmp_path / "copy").read_bytes()

    def together() -> bytes:
        part = FileRef("part", len(data), ref.digest, "x", 0)
        return storage.read_together([part])["part"]

    reads: list[Callable[[], bytes]] = [lambda: storage.read(ref), lambda: storage.get("x"), through_file, together]
    reads.append(lambda: storage.get_range("x", 0, len(data)))
    for read in reads:
        s3.plan(Fault("cut", "GET", keep=keep, times=2))
        assert read() == data
        assert len(s3.clock.waits) == 2
    s3.plan(Fault("cut", "GET", keep=min(keep, 100), times=2))
    assert storage.list() == [("x", 100_000)]
    assert len(s3.clock.waits) == 2


def test_a_large_file_is_read_on_behind_what_has_come(s3: S3, tmp_path: Path) -> None:
    """Each break comes behind another piece, so that the time for repeats begins anew."""
    data = os.urandom(13 << 20)
    (tmp_path / "source").write_bytes(data)
    storage = s3.open(retry_seconds=0.15)
    ref = storage.put_file("x", tmp_path / "source")
    for read in (lambda: storage.read_to_file(ref, tmp_path / "copy"), lambda: storage.check(ref)):
        s3.plan(Fault("cut", "GET", keep=6 << 20, times=2))
        read()
        ranges = [seen.headers.get("range", "bytes=0-") for seen in s3.proxy.seen]
        first, second, third = (int(asked.removeprefix("bytes=").removesuffix("-")) for asked in ranges)
        assert first == 0 and second >= 4 << 20 and third - second >= 4 << 20
    assert (tmp_path / "copy").read_bytes() == data


def test_a_late_answer_is_waited_for(s3: S3) -> None:
    storage = s3.open()
    s3.plan(Fault("delay", "PUT", seconds=0.3))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(storage.put_new, "x", b"late")
        while s3.direct().list() == []:
            time.sleep(0.01)
        with pytest.raises(FileExistsInStorageError):
            storage.put_new("x", b"other")
        assert storage.read(late.result()) == b"late"
    assert s3.clock.waits == [] and s3.proxy.count("PUT") == 2


# -- a create whose outcome is not known ---------------------------------------------------------


@pytest.mark.parametrize("lost", [1, only_thorough(3)])
@pytest.mark.parametrize(("kind", "status"), [("drop_after", 0), ("answer_after", 500), ("answer_after", 503)])
def test_a_create_whose_answer_was_lost_or_an_error_is_ours(s3: S3, kind: Kind, status: int, lost: int) -> None:
    s3.plan(Fault(kind, "PUT", times=lost, status=status))
    ref = s3.open().put_new("x", b"mine")
    assert [s.status for s in s3.proxy.seen if s.method == "PUT"] == [status] * lost + [412]
    assert s3.direct().read(ref) == b"mine"


def test_a_lost_answer_does_not_make_anothers_file_ours(s3: S3) -> None:
    s3.direct().put_new("x", b"theirs")
    kinds: tuple[Kind, ...] = ("drop_before", "drop_after", "answer_after")
    for kind in kinds:
        s3.plan(Fault(kind, "PUT"))
        with pytest.raises(FileExistsInStorageError):
            s3.open().put_new("x", b"mine")
        assert len(s3.clock.waits) == 1
    assert s3.direct().get("x") == b"theirs"


def test_an_answer_that_says_exists_holds_though_what_follows_fails(s3: S3) -> None:
    """The first answer was not lost, so the file is another's, even one of the same content."""
    s3.direct().put_new("x", b"same")
    s3.plan(Fault("answer", "GET", times=2))
    with pytest.raises(FileExistsInStorageError):
        s3.open().put_new("x", b"same")
    assert [(s.method, s.status) for s in s3.proxy.seen] == [
        ("PUT", 412),
        ("GET", 503),
        ("PUT", 412),
        ("GET", 503),
        ("PUT", 412),
        ("GET", 200),
    ]


def test_a_conflict_that_leaves_no_file_is_tried_again(s3: S3) -> None:
    s3.plan(Fault("answer", "PUT", status=409, times=2))
    s3.open().put_new("x", b"mine")
    assert len(s3.clock.waits) == 2 and s3.direct().get("x") == b"mine"


def test_a_create_that_was_never_answered_is_whole_or_absent(s3: S3) -> None:
    s3.plan(Fault("drop_after", times=1000))
    with pytest.raises(StorageError, match=r"tried for \d") as failed:
        s3.open().put_new("x", b"mine")
    assert not isinstance(failed.value, FileExistsInStorageError)
    assert s3.direct().get("x") == b"mine"


# -- large files, in parts -----------------------------------------------------------------------

LARGE = 8_500_000
"""Two parts."""


@pytest.mark.parametrize(
    "faults",
    [
        only_thorough(()),
        only_thorough((Fault("answer", "PUT", "partNumber=2"),)),
        (Fault("drop_after", "PUT", "partNumber=1"), Fault("drop_before", "POST", "uploads")),
        (Fault("drop_after", "POST", "uploadId"),),
    ],
)
def test_a_large_file_goes_through_whole(s3: S3, tmp_path: Path, faults: tuple[Fault, ...]) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(os.urandom(LARGE))
    storage = s3.open()
    s3.plan(*(again(fault, 1, fault.method, fault.path) for fault in faults))
    ref = storage.put_file("large", source)
    assert s3.proxy.count("PUT", "partNumber=") >= 2
    assert all(fault.happened == 1 for fault in s3.proxy.plan) and s3.clock.waits == [], "parts are repeated one by one"
    s3.plan(*([Fault("cut", "GET", keep=3_000_000)] if faults else []))
    storage.read_to_file(ref, copy)
    assert copy.read_bytes() == source.read_bytes()
    assert storage.list() == [("large", LARGE)]


def test_large_changes_under_a_name_of_their_own_go_in_parts(s3: S3) -> None:
    data = os.urandom(LARGE)
    storage = s3.open()
    ref = storage.put_unique("large", data)
    assert s3.proxy.count("PUT", "partNumber=") == 2 and storage.read(ref) == data
    s3.plan()
    small = storage.put_unique("small", b"1")
    assert storage.read(small) == b"1" and s3.proxy.seen[0].headers["if-none-match"] == "*"


@pytest.mark.parametrize("status", [403, only_thorough(503)])
def test_a_large_file_that_fails_is_not_half_there(s3: S3, tmp_path: Path, status: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(LARGE))
    storage = s3.open(retry_seconds=1)
    s3.plan(Fault("answer", "PUT", "partNumber=2", status=status, times=1000))
    with pytest.raises(StorageError, match=rf"s3://{s3.bucket}/dir/large"):
        storage.put_file("large", source)
    assert s3.direct().list() == []


# -- a provider over it --------------------------------------------------------------------------


def open_provider(s3: S3, local_dir: Path) -> RocksDBStateStoreProvider:
    location = f"s3a://{s3.bucket}/ck"
    conf = StateStoreConf(deltas_per_snapshot=3, min_versions_to_retain=3)
    # All threads share the clock: what one of them waits, the others have waited too.
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


def test_storage_does_not_hold_up_reads_of_what_is_loaded(s3: S3, tmp_path: Path) -> None:
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
def test_a_commit_that_fails_for_good_changes_nothing(s3: S3, tmp_path: Path, fault: Fault, path: str) -> None:
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


# -- a store that ignores conditions -----------------------------------------------------------


def test_a_store_that_ignores_if_none_match_is_refused_by_name_and_one_that_has_lost_answers_is_not(s3: S3) -> None:
    s3.proxy.ignores_conditions = True
    try:
        with pytest.raises(UnsupportedLocationError, match="overwrites files") as refused:
            CreateIfAbsentProofs().require(s3.open())
    finally:
        s3.proxy.ignores_conditions = False
    assert f"{s3.bucket}/dir (at {s3.proxy.endpoint})" in str(refused.value)
    s3.direct().delete(CREATE_PROBE)
    s3.plan(Fault("drop_after", "PUT", times=2, skip=1, recurs=True), Fault("drop_after", "PUT"))
    proofs = CreateIfAbsentProofs()
    proofs.require(s3.open())
    asked = s3.proxy.count("PUT")
    assert asked >= 4 and s3.direct().exists(CREATE_PROBE)
    proofs.require(s3.open())
    assert s3.proxy.count("PUT") == asked
