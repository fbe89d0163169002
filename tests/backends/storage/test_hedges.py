"""A request that is late is made a second time, and the first answer wins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ALL_COMPLETED, Future, wait
from typing import Any

import pytest

from backends.exceptions import FileExistsInStorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.failures import FEWEST, HEDGED_BYTES, MAX_AT_ONCE, MIN_SECONDS, REMEMBERED, SHARE, Hedges
from backends.storage.locations import FileRef, digest
from backends.storage.requests import BucketTraffic, RequestCounts
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server
from tests.patience import PATIENCE


def usual(hedges: Hedges, seconds: float = 0.01, kind: str = "read") -> None:
    for _ in range(REMEMBERED):
        hedges.took(kind, seconds)


def always_late(calls: Collection[Future[Any]], seconds: float | None) -> Collection[Future[Any]]:
    """Wait for all that can be had, but say of no call that it was in time."""
    return () if seconds is not None else wait(calls, PATIENCE, return_when=ALL_COMPLETED).done


def never() -> None:
    raise AssertionError("nothing was late")


def test_a_request_is_late_by_the_last_requests_of_its_kind() -> None:
    hedges = Hedges()
    for i in range(FEWEST):
        assert hedges.late_after("read") is None
        hedges.took("read", 0.1 if i % 2 else 0.2)
    assert hedges.late_after("read") == pytest.approx(0.3) and hedges.late_after("write") is None
    for _ in range(REMEMBERED):
        hedges.took("read", 0.001)
    assert hedges.late_after("read") == MIN_SECONDS
    # One of a hundred that takes long is not usual.
    usual(hedges, 0.1, "write")
    hedges.took("write", 10.0)
    assert hedges.late_after("write") == pytest.approx(0.15)


def test_a_request_in_time_is_made_once() -> None:
    hedges = Hedges(lambda calls, seconds: wait(calls, PATIENCE).done)
    usual(hedges)
    made: list[int] = []
    for _ in range(100):
        hedges.first_answer("read", lambda: made.append(1), never)
    assert len(made) == 100


@pytest.mark.parametrize("answers", [("error", "second"), ("first", "error")])
def test_the_answer_counts_where_the_other_call_fails(answers: tuple[str, str]) -> None:
    hedges = Hedges(always_late)
    usual(hedges)
    left, seconds = iter(answers), []

    def attempt() -> str:
        answer = next(left)
        if answer == "error":
            raise ConnectionError(answer)
        return answer

    assert hedges.first_answer("read", attempt, lambda: seconds.append(1)) in ("first", "second")
    assert seconds == [1]


def test_if_both_fail_the_first_error_is_raised() -> None:
    hedges = Hedges(always_late)
    usual(hedges)
    errors = iter([ConnectionError("first"), ConnectionError("second")])

    def attempt() -> None:
        raise next(errors)

    with pytest.raises(ConnectionError, match="first"):
        hedges.first_answer("read", attempt, lambda: None)


def test_if_all_are_late_few_are_made_twice() -> None:
    hedges = Hedges(always_late)
    usual(hedges)
    seconds: list[int] = []
    for _ in range(1000):
        hedges.first_answer("read", lambda: None, lambda: seconds.append(1))
    assert 0.9 * 1000 * SHARE <= len(seconds) <= MAX_AT_ONCE + 1001 * SHARE * 1.1


# -- storage -------------------------------------------------------------------------------------


class Hedged:
    """A bucket whose requests are usually fast. ``hold`` holds the answer to the next request of a method back."""

    def __init__(self, server: S3Server, proxy: FaultProxy, bucket: str) -> None:
        server.make_bucket(bucket)
        self.proxy = proxy
        self.counts = RequestCounts()
        options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true"}
        options |= {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}
        buckets = BucketTraffic(lambda: 0.0)  # requests that are held back stay so
        self.storage = CheckpointStorage.open(f"s3://{bucket}/ck", options, requests=self.counts, buckets=buckets)
        # Nothing is usual there: its requests have no second one, however slow the machine is.
        self.direct = CheckpointStorage.open(f"s3://{bucket}/ck", options, buckets=BucketTraffic())
        hedges = buckets.of(f"s3://{bucket} {proxy.endpoint}", with_hedges=True).hedges
        assert hedges is not None
        for verb in ("read", "write"):
            usual(hedges, 0.1, verb)

    def hold(self, method: str) -> None:
        self.proxy.plan, self.proxy.seen = [Fault("hold", method)], []


@pytest.fixture
def s3(servers: tuple[S3Server, FaultProxy], request: pytest.FixtureRequest) -> Iterator[Hedged]:
    server, proxy = servers
    proxy.plan, proxy.seen = [], []
    yield Hedged(server, proxy, f"hedged-{abs(hash(request.node.name))}")
    for fault in proxy.plan:
        fault.let_go.set()


def test_a_late_read_is_made_again(s3: Hedged) -> None:
    ref = s3.direct.put_new("x", b"content")
    part = FileRef("part", 3, digest(b"nte"), "x", 2)
    reads: list[Callable[[], object]] = [
        lambda: s3.storage.read(ref),
        lambda: s3.storage.read(part),
        lambda: s3.storage.read_together([part]),
    ]
    for read, answer in zip(reads, (b"content", b"nte", {"part": b"nte"}), strict=True):
        before = s3.counts.read()["get"]
        s3.hold("GET")
        assert read() == answer
        assert s3.proxy.plan[0].happened == 1 and s3.counts.read()["get"] == before + 2
        s3.proxy.plan[0].let_go.set()


def test_a_late_write_is_made_again_and_meets_its_own_object(s3: Hedged) -> None:
    s3.hold("PUT")
    ref = s3.storage.put_new("x", b"mine")
    # The first was carried out; the second is refused, looks, and finds what it was to write.
    assert [(seen.method, seen.status) for seen in s3.proxy.seen] == [("PUT", 412), ("GET", 200)]
    assert s3.storage.read(ref) == b"mine" and s3.storage.list() == [("x", 4)]


def test_a_late_write_whose_name_another_has_taken_is_not_ours(s3: Hedged) -> None:
    s3.direct.put_new("x", b"theirs")
    s3.hold("PUT")
    with pytest.raises(FileExistsInStorageError):
        s3.storage.put_new("x", b"mine")
    assert s3.counts.read()["put"] == 2 and s3.direct.get("x") == b"theirs"


def test_large_files_and_refused_requests_are_sent_once(s3: Hedged) -> None:
    s3.proxy.plan = [Fault("delay", seconds=5 * MIN_SECONDS, times=100)]
    ref = s3.storage.put_new("large", bytes(HEDGED_BYTES + 1))
    assert s3.counts.read()["put"] == 1
    s3.storage.get_range("large", 0, HEDGED_BYTES + 1)
    s3.storage.read(ref)
    assert s3.counts.read()["get"] == 2
    s3.proxy.plan = [Fault("answer", "GET", status=503), *s3.proxy.plan]
    s3.storage.read(ref)
    assert s3.counts.read()["get"] == 4, "one was refused"
    s3.storage.get_range("large", 0, 1)
    assert s3.counts.read()["get"] == 5, "no request is made twice while requests are held back"
