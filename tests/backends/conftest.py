"""The state of one partition, with either backend."""

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.partition.partition_steps import CONF

DIRECTORY = "operators/op/1/0/default"


@pytest.fixture
def storage(tmp_path):
    return CheckpointStorage.open(str(tmp_path / "ck"), fsync=False)


@pytest.fixture(params=[RocksDBStateStoreProvider, FileStateStoreProvider], ids=["rocksdb", "file"])
def provider(request):
    return request.param


@pytest.fixture
def open_state(provider, storage):
    made = []

    def opened(local_dir):
        made.append(PartitionState(local_dir, storage, DIRECTORY, CONF, provider.backend, provider.engine))
        return made[-1]

    yield opened
    for state in made:
        state.close()


@pytest.fixture
def state(tmp_path, open_state):
    return open_state(tmp_path / "local")
