"""Providers on a real S3 protocol, with throttling, lost answers and slowness; storage itself: test_s3_faults.py."""

import pyarrow as pa
import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import (
    StorageError,
    VersionNotFoundError,
)
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import BucketTraffic
from tests.backends.storage.s3_server import faulty_s3

# Otherwise: test_s3_faults.py has a long list, a large file, failures of all kinds below a provider, and a commit that
# fails permanently.
pytestmark = pytest.mark.thorough

PROVIDERS = [RocksDBStateStoreProvider, FileStateStoreProvider]
CONF = StateStoreConf(deltas_per_snapshot=3, min_versions_to_retain=3)


@pytest.fixture(scope="module")
def server():
    with faulty_s3() as running:
        yield running


@pytest.fixture
def s3(server):
    server.heal()
    server.requests.clear()
    yield server
    server.heal()


@pytest.fixture(scope="module")
def boto(server):
    import boto3

    made = boto3.client(
        "s3",
        endpoint_url=f"http://{server.backend[0]}:{server.backend[1]}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    made.create_bucket(Bucket="bucket")
    return made


def options(s3, **more):
    return {
        "spark.hadoop.fs.s3a.endpoint": s3.endpoint,
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": "key",
        "spark.hadoop.fs.s3a.secret.key": "secret",
        **more,
    }


@pytest.fixture
def waits():
    return []


@pytest.fixture
def open_storage(s3, boto, request, waits):
    def opened(directory=request.node.name, bucket="bucket", **kwargs):
        now = [0.0]

        def sleep(seconds):
            waits.append(seconds)
            now[0] += seconds

        return CheckpointStorage.open(
            f"s3a://{bucket}/{directory}",
            options(s3),
            clock=lambda: now[0],
            sleep=sleep,
            retry_seconds=5.0,
            buckets=BucketTraffic(lambda: now[0]),
            **kwargs,
        )

    return opened


@pytest.fixture
def storage(open_storage):
    return open_storage()


def test_listing_continues_after_the_first_thousand(storage, boto):
    from moto.s3.models import s3_backends

    prefix = storage.location.removeprefix("s3://bucket/")
    for i in range(1005):
        s3_backends["123456789012"]["aws"].put_object("bucket", f"{prefix}/many/{i:05d}", b"x")
    assert [path for path, _ in storage.list("many")] == [f"many/{i:05d}" for i in range(1005)]


def test_files_larger_than_memory_go_through_in_pieces(storage, tmp_path, s3):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(bytes(range(256)) * 50_000)
    ref = storage.put_file("large.sst", source)
    s3.fail("cut", "503", method="GET")
    storage.read_to_file(ref, target)
    assert target.read_bytes() == source.read_bytes()


@pytest.fixture(params=PROVIDERS, ids=[p.backend for p in PROVIDERS])
def open_provider(request, storage):
    made = []

    def opened():
        made.append(request.param(StateStoreId(storage.location, "op", 0), CONF, storage=storage))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


def put(provider, version, **pairs):
    store = provider.get_store(version)
    for key, value in pairs.items():
        store.put(key.encode(), value.encode())
    return store.commit()


def test_a_provider_survives_throttling(open_provider, s3):
    provider = open_provider()
    seen = [0]

    def every_third(method, path):
        seen[0] += 1
        return ("503", "drop", "lose answer")[seen[0] // 3 % 3] if seen[0] % 3 == 0 else None

    s3.fault = every_third
    for version in range(9):
        put(provider, version, **{f"k{version % 4}": str(version)})
        provider.do_maintenance()
    fresh = open_provider()
    assert dict(fresh.get_store(9).iterator()) == {b"k0": b"8", b"k1": b"5", b"k2": b"6", b"k3": b"7"}
    with pytest.raises(VersionNotFoundError):
        fresh.get_store(1)
    assert seen[0] > 60


def test_a_commit_that_fails_permanently_leaves_everything_as_before(open_provider, s3, storage):
    provider = open_provider()
    put(provider, 0, a="1")
    before = storage.list()
    store = provider.get_store(1)
    store.put_many(pa.array([b"a", b"b"]), pa.array([b"2", b"2"]))
    s3.fail_always("503", "PUT")
    with pytest.raises(StorageError, match="tried for"):
        store.commit()
    s3.heal()
    assert not store.has_committed and provider.latest_version() == 1
    assert dict(provider.get_read_store(1).iterator()) == {b"a": b"1"} and storage.list() == before
    assert store.commit() == 2
    assert dict(open_provider().get_store(2).iterator()) == {b"a": b"2", b"b": b"2"}
