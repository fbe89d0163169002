"""Storage requests are counted by kind, each attempt as one.

What requests cost, and prices that a user gives.

Requests to storage are timed, and those that fail are counted, repeated ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.exceptions import FileExistsInStorageError, InvalidStateStoreArgument, MissingFileError, StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest
from backends.storage.requests import Prices, RequestCounts, num_requests, used_since, used_together
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


def test_bytes_are_counted_by_location(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(500))
    for place in (str(tmp_path / "ck"), "memory://request-bytes/ck"):
        counts = RequestCounts()
        storage = CheckpointStorage.open(place, requests=counts)
        ref = storage.put_new("a", bytes(100))
        large = storage.put_file("b", tmp_path / "source")
        before = storage.used
        assert before == {"put": 2, "sent_bytes": 600}
        storage.read(ref)
        storage.read_to_file(large, tmp_path / "copy")
        storage.get_range("a", 10, 20)
        storage.read_together([FileRef("part", 30, digest(bytes(30)), "a", 5)])
        assert used_since(storage.used, before) == {"get": 4, "received_bytes": 650}
        assert counts.at("elsewhere") == {}


def test_counters_that_were_reset_count_from_zero() -> None:
    assert used_since({"put": 5, "get": 2}, {"put": 3, "get": 2}) == {"put": 2}
    assert used_since({"put": 2}, {"put": 300}) == {"put": 2}
    together = used_together({"put": 1, "sent_bytes": 9}, {"put": 2, "list": 1})
    assert together == {"put": 3, "sent_bytes": 9, "list": 1} and num_requests(together) == 4


def test_the_parts_of_a_large_file_are_requests(servers: tuple[S3Server, FaultProxy], tmp_path: Path) -> None:
    counts = RequestCounts()
    server, proxy = servers
    server.make_bucket("counted-parts")
    options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true"}
    options |= {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}
    storage = CheckpointStorage.open("s3://counted-parts/ck", options, requests=counts)
    (tmp_path / "source").write_bytes(bytes(9 << 20))
    proxy.seen, proxy.plan = [], []
    storage.put_file("large", tmp_path / "source")
    assert counts.read()["put"] == len(proxy.seen) == 4, "begun, two parts, ended"


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


def test_each_kind_has_its_price() -> None:
    used = {"put": 1000, "get": 2000, "head": 1000, "list": 3000, "delete": 9000}
    assert Prices().dollars(used) == pytest.approx(0.005 + 0.0008 + 0.0004 + 0.015)
    moved = {"sent_bytes": 1 << 30, "received_bytes": 2 << 30}
    assert Prices().dollars(moved) == 0 == Prices().dollars({})
    assert Prices(sent_gib=0.01, received_gib=0.09).dollars(moved) == pytest.approx(0.19)


def test_missing_prices_are_defaults_and_the_string_says_all() -> None:
    given = Prices.parse(" put=0.0054, received_gib = 0.09 ")
    assert given == Prices(put=0.0054, received_gib=0.09) == Prices.parse(str(given)) and Prices.parse("") == Prices()


@pytest.mark.parametrize("text", ["putt=1", "put", "put=", "put=x", "put=-1", "put=nan", "put=inf", "put=1,get"])
def test_an_unknown_price_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=r"is not a price: give put=, get=, .* dollars"):
        Prices.parse(text)


def test_failures_and_durations_are_counted_by_kind(tmp_path: Path) -> None:
    requests = RequestCounts()
    storage = CheckpointStorage.open(str(tmp_path), requests=requests)
    storage.put_new("a", b"1")
    assert requests.failures() == dict.fromkeys(requests.read(), 0)
    assert {kind: b.count for kind, b in requests.durations().items()} == requests.read()
    with pytest.raises(StorageError):
        storage.put_new("a/b", b"1")  # a is a file, no directory
    assert requests.failures() == {**dict.fromkeys(requests.read(), 0), "put": 1}
    assert {kind: b.count for kind, b in requests.durations().items()} == requests.read()
