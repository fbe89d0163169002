"""Keys are forgotten in a checkpoint on S3, over the real protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_bridge.state_data.frames import state_table
from spark_bridge.state_surgery.forget_keys import forget_keys
from tests.backends.storage.s3_server import faulty_s3
from tests.spark_bridge.state_flows import Flow
from tests.spark_bridge.state_surgery.traces import patterns_of

pytestmark = pytest.mark.thorough  # otherwise: test_forget_keys.py on a local disk, over the same storage interface

GONE, STAYS = "Zr7mQx2vNc9bLt4wKs1e", "Hd5gYu8jPf3oAi6kXz0q"


def test_no_object_has_a_forgotten_key(tmp_path: Path) -> None:
    flow = Flow(tmp_path, backend="rocksdb")
    for version in range(6):
        flow.batch({(user, 0): lambda of, n=version: of.total.update((n, "x")) for user in (GONE, STAYS)})
        for upload in flow.host.maintenance.do_maintenance():
            upload.result()
    flow.stop()
    with faulty_s3() as server:
        server.put_all("bucket", "ck", Path(flow.location))
        made, options = server.client(), server.settings

        def objects_with(name: str) -> list[str]:
            keys = [one["Key"] for one in made.list_objects_v2(Bucket="bucket", Prefix="ck/")["Contents"]]
            contents = {key: made.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}
            return [key for key, data in contents.items() if any(p in data for p in patterns_of(name))]

        assert objects_with(GONE)
        forget_keys("s3://bucket/ck", "op", [(GONE, 0)], storage_options=options)
        assert objects_with(GONE) == [] and objects_with(STAYS)
        for version in range(1, 7):
            found = state_table("s3://bucket/ck", "op", "total", version, storage_options=options)
            assert found["user"].to_pylist() == [STAYS]
