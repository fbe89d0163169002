"""Creates whose outcome is not known: lost answers, conflicts, and stores that ignore the condition."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.exceptions import FileExistsInStorageError, StorageError, UnsupportedLocationError
from backends.storage.checkpoint_storage import CREATE_PROBE, CreateIfAbsentProofs
from tests.backends.storage.s3_bucket import S3, again
from tests.backends.storage.s3_faults import Fault, Kind
from tests.effort import only_thorough

pytestmark = pytest.mark.long


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


def test_large_changes_under_a_unique_name_are_uploaded_in_parts(s3: S3) -> None:
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
