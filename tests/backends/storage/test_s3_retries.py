"""Errors of S3 that pass are retried with growing waits, and late or cut answers are read on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.exceptions import FileExistsInStorageError, MissingFileError, StorageError
from backends.storage.locations import FileRef, digest
from tests.backends.storage.s3_bucket import S3, TRANSIENT, again, calls_on
from tests.backends.storage.s3_faults import Fault
from tests.effort import only_thorough
from tests.patience import PATIENCE

pytestmark = pytest.mark.long


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
    with pytest.raises(StorageError, match=r"tried for \d+\.\d s: .*503.*: SlowDown$"):
        storage.put_new("x", b"1")
    assert 0.1 < time.monotonic() - started < PATIENCE
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


def test_a_large_file_is_read_from_where_the_connection_broke(s3: S3, tmp_path: Path) -> None:
    """Each connection breaks after another piece, so that the time for repeats starts again."""
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
