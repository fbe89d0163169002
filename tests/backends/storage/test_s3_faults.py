"""Storage and a provider on a real S3-protocol server, also while the network and the service fail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StorageError
from backends.storage.locations import FileRef
from tests.backends.storage.s3_bucket import S3, calls_on
from tests.backends.storage.s3_faults import Fault
from tests.effort import only_thorough

pytestmark = pytest.mark.long


# -- what works ----------------------------------------------------------------------------------


def test_a_written_file_can_be_read_listed_and_deleted(s3: S3) -> None:
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
    # A location is a directory: it does not contain another that begins with its name.
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
    # HEAD says 404 without a body, whether the file or the bucket is missing.
    assert calls.pop("exists")() is False
    calls["read_to_file"] = lambda: storage.read_to_file(FileRef("there", 7, ""), tmp_path / "copy")
    for call in calls.values():
        s3.plan()
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/dir/.*: NoSuchBucket$") as failed:
            call()
        assert not isinstance(failed.value, MissingFileError)
        assert len(s3.proxy.seen) == 1 and s3.clock.waits == []


def test_forbidden_requests_are_not_retried(s3: S3) -> None:
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
