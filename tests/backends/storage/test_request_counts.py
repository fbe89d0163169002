"""What is asked of storage is counted by kind, each attempt as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.exceptions import FileExistsInStorageError, MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.request_counts import RequestCounts
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server


@pytest.mark.parametrize("place", [lambda tmp: str(tmp / "ck"), lambda tmp: "memory://request-counts/ck"])
def test_each_kind_is_counted_whatever_the_answer(place: Callable[[Path], str], tmp_path: Path) -> None:
    counts = RequestCounts()
    storage = CheckpointStorage.open(place(tmp_path), requests=counts)
    held = storage.put_new("a", b"1")
    with pytest.raises(FileExistsInStorageError):
        storage.put_new("a", b"1")
    storage.read(held)
    with pytest.raises(MissingFileError):
        storage.get("b")
    assert storage.exists("a") and storage.list() == [("a", 1)]
    storage.delete("a")
    # In an object store, the file of that name is looked at: an attempt before may have written it.
    gets = 2 if storage.is_local else 3
    assert counts.read() == {"put": 2, "get": gets, "head": 1, "list": 1, "delete": 1}


def test_attempts_that_storage_fails_are_counted_and_storages_share_the_counts(
    servers: tuple[S3Server, FaultProxy],
) -> None:
    counts = RequestCounts()
    server, proxy = servers
    server.make_bucket("counted")
    proxy.seen = []
    options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true"}
    options |= {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}
    one, other = (
        CheckpointStorage.open("s3://counted/ck", options, requests=counts, sleep=lambda _: None) for _ in range(2)
    )
    one.put_new("a", b"1")
    proxy.plan = [Fault("answer", method="GET", status=503, times=2)]
    assert other.get("a") == b"1"
    assert counts.read() == {"put": 1, "get": 3, "head": 0, "list": 0, "delete": 0}
    assert sum(counts.read().values()) == len(proxy.seen)
