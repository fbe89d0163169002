"""What is RocksDB's own: the local directory that is used again."""

from pathlib import Path

import pytest

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import MissingFileError

from .test_provider_behaviour import commit, content


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "ck")


def open_provider(location, **kwargs):
    return RocksDBStateStoreProvider(StateStoreId(location, "op", 0), StateStoreConf(fsync=False), **kwargs)


def test_a_local_directory_is_used_again_if_it_proves_right(location, tmp_path):
    with open_provider(location, local_dir=tmp_path / "local") as first:
        commit(first, 0, a="1")
        commit(first, 1, b="2")
    for changelog in Path(location).rglob("*.changelog"):
        changelog.unlink()
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(2)) == {"a": "1", "b": "2"}
        with pytest.raises(MissingFileError, match=r"\.changelog"):
            again.get_store(1)
