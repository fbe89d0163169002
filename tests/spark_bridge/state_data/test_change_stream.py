"""Offsets of the ``ray_statestore`` stream: its start, the contents of a batch, and a query that goes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from spark_bridge.state_data.frames import state_changes_table, state_table
from spark_bridge.state_data.source_options import SourceOptions
from tests.spark_bridge.state_flows import Flow

pytestmark = [
    pytest.mark.spark,  # only Spark 4 has such streams; no session is needed
    pytest.mark.spark42_only,
    pytest.mark.skipif(pyspark.__version__ < "4.2", reason="Earlier lines of Spark have no limits."),
    pytest.mark.slow,
]
USERS = [(user, 0) for user in "abcdefgh"]


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Flow]:
    made = Flow(tmp_path)
    for _ in range(5):
        batch(made)
    yield made
    made.close()


def batch(flow: Flow) -> None:
    version = flow.version + 1
    flow.batch({user: lambda of: of.total.update((version, "x")) for user in USERS})


def stream(flow: Flow, reader_class: str = "ChangeStreamReader", **options: Any) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    from spark_bridge.state_data import state_reader
    from spark_bridge.state_data.source_options import source_schema

    given = {"path": flow.location, "operator": "op", "stateVarName": "total", "readChangeFeed": True, **options}
    of = SourceOptions.of({name: str(value) for name, value in given.items()})
    return getattr(state_reader, reader_class)(of, from_arrow_schema(source_schema(of)))


def rows(reader: Any, begin: int, end: int) -> list[Any]:
    """Return the rows of a batch between two offsets."""
    parts = reader.partitions({"version": begin}, {"version": end})
    tables = [pa.Table.from_batches([b]) for part in parts for b in reader.read(part)]
    return pa.concat_tables(tables).to_pylist() if tables else []


def in_order(found: list[Any]) -> list[str]:
    return sorted(map(repr, found))


def test_stream_begins_at_the_requested_version(flow: Flow) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    for starting, begin in ((None, -1), ("state", -1), ("latest", 5), ("earliest", 0), (3, 3)):
        reader = stream(flow, **({} if starting is None else {"startingVersion": starting}))
        start = reader.initialOffset()
        assert start == ({"version": begin, "run": "run1"} if begin > 0 else {"version": begin})
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end == {"version": 5, "run": "run1"}
        found = rows(reader, begin, 5)
        if begin < 0:
            assert len(found) == len(USERS) and {row["change_type"] for row in found} == {"insert"}
        else:
            changes = state_changes_table(flow.location, "op", "total", from_version=begin, to_version=5).to_pylist()
            assert [row["version"] for row in found].count(5) == (len(USERS) if begin < 5 else 0)
            assert len(found) == len(changes)
    with pytest.raises(VersionNotFoundError, match=r"Version 9 .* there are the versions"):
        stream(flow, startingVersion=9).initialOffset()


def test_batches_follow_each_other_without_a_gap(flow: Flow) -> None:
    reader = stream(flow, startingVersion="earliest", maxVersionsPerTrigger=2)
    at, found = reader.initialOffset(), []
    while True:
        end = reader.latestOffset(at, reader.getDefaultReadLimit())
        if end == at:
            break
        assert end["version"] <= at["version"] + 2
        found += rows(reader, at["version"], end["version"])
        at = end
    assert in_order(found) == in_order(rows(reader, 0, 5)) and len(found) == 5 * len(USERS)
    last = {row["user"]: row["after"]["n"] for row in found if row["version"] == 5}
    assert last == {row["user"]: row["n"] for row in state_table(flow.location, "op", "total").to_pylist()}


def test_rolled_back_query_is_reported(flow: Flow) -> None:
    reader = stream(flow)
    for name in ("commits/4", "commits/3", "offsets/4"):
        (Path(flow.location) / name).unlink()
    with pytest.raises(VersionNotFoundError, match="went back to version 3, but changes up to version 5 have been"):
        reader.latestOffset({"version": 5}, reader.getDefaultReadLimit())
    check_new_stream(flow, 3)


def test_spark_4_0_reads_all_versions_and_reports_a_rolled_back_query(flow: Flow) -> None:
    """It gives the reader neither the start of a batch nor a limit, and asks for the partitions of any two offsets."""
    reader = stream(flow, "UnlimitedChangeStreamReader")
    assert reader.latestOffset() == {"version": 5, "run": "run1"}
    for name in ("commits/4", "commits/3", "offsets/4"):
        (Path(flow.location) / name).unlink()
    end = reader.latestOffset()
    with pytest.raises(VersionNotFoundError, match="went back to version 3, but changes up to version 5 have been"):
        reader.partitions({"version": 5}, end)
    assert {row["after"]["n"] for row in rows(reader, -1, end["version"])} == {3}


@pytest.mark.parametrize("reader_class", ["ChangeStreamReader", "UnlimitedChangeStreamReader"])
def test_rolled_back_query_that_has_caught_up_is_reported(flow: Flow, reader_class: str) -> None:
    """The stream was stopped, or waited for its trigger, while the query went back and made its versions again."""
    reader = stream(flow, reader_class)

    def latest(start: dict[str, Any]) -> Any:
        if reader_class == "UnlimitedChangeStreamReader":
            return reader.latestOffset()
        return reader.latestOffset(start, reader.getDefaultReadLimit())

    read = latest(reader.initialOffset())
    for name in ("commits/4", "commits/3", "offsets/4"):
        (Path(flow.location) / name).unlink()
    again = flow.restarted("run2", 2, "file")
    assert again.version == 3
    for _ in range(3):
        batch(again)
    with pytest.raises(VersionNotFoundError, match="went back to a version before 5, and has made that one again"):
        reader.partitions(read, latest(read))
    with pytest.raises(VersionNotFoundError, match="went back"):  # a batch that runs again
        reader.partitions({"version": 3}, read)
    assert {row["version"] for row in rows(reader, 3, 6)} == {4, 5, 6}, "offsets without a run are read as before"
    check_new_stream(again, 6)
    again.close()


def test_spark_4_0_refuses_a_limit_of_versions(flow: Flow) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=r"on Spark 4\.0 or 4\.1 has no option 'maxVersionsPerTrigger'"):
        stream(flow, "UnlimitedChangeStreamReader", maxVersionsPerTrigger=2)


def test_missing_versions_are_reported(flow: Flow) -> None:
    reader = stream(flow)
    with pytest.raises(VersionNotFoundError, match=r"after version 3 up to version 9 are no longer kept"):
        reader.partitions({"version": 3}, {"version": 9})
    check_new_stream(flow, 5)


def check_new_stream(flow: Flow, version: int) -> None:
    """Follow "Start this stream with a new checkpoint": it begins with the state that there is."""
    reader = stream(flow)
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    assert end["version"] == version
    found = {row["user"]: row["after"]["n"] for row in rows(reader, begin["version"], end["version"])}
    assert found == {user: version for user, _ in USERS}
