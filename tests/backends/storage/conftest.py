"""One S3 server for all tests of storage, and the proxy before it: it takes longer to start than most tests take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.storage.s3_faults import FaultProxy, S3Server, fault_proxy, s3_server


@pytest.fixture(scope="package")
def servers() -> Iterator[tuple[S3Server, FaultProxy]]:
    with s3_server() as server, fault_proxy(server) as proxy:
        yield server, proxy
