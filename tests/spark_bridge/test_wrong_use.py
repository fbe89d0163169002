"""What ``serve_state`` refuses, before it asks for a Ray cluster."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import InvalidStateStoreArgument, MissingFileError
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge import serve_state, serving
from spark_bridge.state_data.checkpoint_client import query_in_storage
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.state_data.format_fixtures import Stored


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(address: str | None, cpus: int) -> bool:
        raise AssertionError("a Ray cluster was asked for")

    monkeypatch.setattr(serving, "join_or_start_ray", join)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"replicas": 0}, "replicas=0: give 1 or more"),
        ({"name": "a/b"}, "name='a/b': give letters"),
        ({"name": ""}, "name=''"),
        ({"operators": ["totals", "other"]}, r"operators=\['totals', 'other'\].*'totals'"),
        ({"operators": []}, r"operators=\[\].*'totals'"),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    query = Cluster(tmp_path)
    query.batch({1: (1, "a")})
    query.close()
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    with pytest.raises(InvalidStateStoreArgument, match=error):
        serve_state(str(tmp_path / "ck"), **options)
    with pytest.raises(AssertionError, match="a Ray cluster was asked for"):
        serve_state(str(tmp_path / "ck"), operators=["totals"])


def test_location_without_state(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        serve_state(str(tmp_path / "nothing"))
    (tmp_path / "metadata").write_text('{"id":"q"}')
    with pytest.raises(MissingFileError, match="No state of a query"):
        serve_state(str(tmp_path))


def test_savepoints(tmp_path: Path) -> None:
    (tmp_path / "savepoint").mkdir()
    (tmp_path / "savepoint" / METADATA_FILE).write_text("{}")
    with pytest.raises(InvalidStateStoreArgument, match="is a savepoint, which has one version"):
        serve_state(str(tmp_path / "savepoint"), follow=True)
    with pytest.raises(InvalidStateStoreArgument, match=r"memory://.* is a savepoint.*scratch="):
        serving._restored("memory:///savepoint", None, None, {}, ExitStack())
    scratch = str(tmp_path / "scratch")
    assert serving._restored(Stored("file").savepoint, ["totals"], scratch, {}, ExitStack()) == scratch
    versions = StateVersions.look(find_state(scratch))
    assert [o.name for o in query_in_storage(versions, versions.completed).operators] == ["totals"]
