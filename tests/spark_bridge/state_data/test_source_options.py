"""Options of the ``ray_statestore`` format and the rows that a table with them reads, without Ray and Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.state_data.frames import state_changes_table, state_table
from spark_bridge.state_data.source_options import SourceOptions, source_of, source_schema
from tests.spark_bridge.state_flows import Flow

CONFLICT = r"^\[STDS_CONFLICT_OPTIONS\]"
INVALID = r"^\[STDS_INVALID_OPTION_VALUE.WITH_MESSAGE\] Invalid value for source option "
USERS = [(user, 0) for user in "abcdefgh"]


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    """Eight versions, with snapshots of versions 2 and 5. In each, every user's value is the version number."""
    made = Flow(tmp_path_factory.mktemp("flow"))
    for version in range(1, 9):
        made.batch({user: lambda of, version=version: of.total.update((version, "x")) for user in USERS})
        if version in (3, 6):
            for instance in made.host.cache.all():
                instance.snapshot_version = -99  # one is due
            for upload in made.host.maintenance.do_maintenance():
                upload.result()
    made.stop()
    yield made


def table(flow: Flow, **options: Any) -> pa.Table:
    given = {"path": flow.location, "operator": "op", "stateVarName": "total", **options}
    source = source_of(SourceOptions.of({name: str(value) for name, value in given.items()}))
    batches = [batch for piece in source.reading.pieces for batch in source.batches(piece)]
    return pa.Table.from_batches(batches, source.schema)


def test_batches_are_versions(flow: Flow) -> None:
    for options, version in (({}, 8), ({"batchId": 4}, 5), ({"version": 5}, 5)):
        assert table(flow, **options).equals(state_table(flow.location, "op", "total", version))
    feed = table(flow, readChangeFeed=True, changeStartBatchId=2, changeEndBatchId=4)
    assert feed.equals(state_changes_table(flow.location, "op", "total", from_version=2, to_version=5))


def test_state_is_made_of_a_snapshot_of_that_batch_or_an_earlier_one(flow: Flow) -> None:
    expected = state_table(flow.location, "op", "total")
    versions = StateVersions.look(find_state(flow.location))
    assert [ref.version for ref in versions.reading("op").pieces[0].lineage.snapshots] == [2, 5]
    for batch, bases in ((0, []), (1, [2]), (3, [2]), (4, [2, 5]), (7, [2, 5])):
        given = {"path": flow.location, "operator": "op", "stateVarName": "total", "snapshotStartBatchId": str(batch)}
        source = source_of(SourceOptions.of(given))
        for piece in source.reading.pieces:
            assert [ref.version for ref in piece.lineage.snapshots] == bases
        assert table(flow, snapshotStartBatchId=batch).equals(expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batchId": 1, "version": 1}, f"{CONFLICT} The options 'batchId', 'version'"),
        ({"operator": ""}, r"^\[STDS_REQUIRED_OPTION_UNSPECIFIED\] 'operator' must be specified"),
        ({"readChangeFeed": True}, r"^\[STDS_REQUIRED_OPTION_UNSPECIFIED\] 'changeStartBatchId' must be specified"),
        (
            {"readChangeFeed": True, "changeStartBatchId": 1, "batchId": 1},
            f"{CONFLICT} The options 'batchId', 'readChangeFeed'.*readChangeFeed is true",
        ),
        ({"changeStartBatchId": 1}, f"{CONFLICT} The options 'changeStartBatchId', 'readChangeFeed'.* is false"),
        ({"startingVersion": "latest"}, "A table has no option 'startingVersion'"),
        ({"readRegisteredTimers": True}, f"{CONFLICT} The options 'stateVarName', 'readRegisteredTimers'"),
        ({"snapshotStartBatchId": "-1"}, r"^\[STDS_INVALID_OPTION_VALUE.IS_NEGATIVE\].*'snapshotStartBatchId'"),
        ({"stateVarName": "totals"}, f"{INVALID}'stateVarName': State variable 'totals' does not exist; there are "),
        (
            {"stateVarName": "totals", "readChangeFeed": True, "changeStartBatchId": 1},
            f"{INVALID}'stateVarName': State variable 'totals' does not exist; there are ",
        ),
        ({"operator": "ops"}, f"{INVALID}'operator': Operator 'ops' does not exist .* there are 'op'"),
        ({"batchId": "x"}, f"{INVALID}'batchId': it is 'x'"),
        ({"flattenCollectionTypes": "maybe"}, f"{INVALID}'flattenCollectionTypes': .* true or false"),
        (
            {"snapshotStartBatchId": 5, "batchId": 4},
            f"{INVALID}'snapshotStartBatchId': it is 5, and must be less than or equal to 4",
        ),
        ({"snapshotStartBatchId": 8}, f"{INVALID}'snapshotStartBatchId': it is 8.*equal to 7"),
        (
            {"readChangeFeed": True, "changeStartBatchId": 3, "changeEndBatchId": 2},
            f"{INVALID}'changeStartBatchId': it is 3, and changeEndBatchId is 2",
        ),
        (
            {"readChangeFeed": True, "changeStartBatchId": 8},
            f"{INVALID}'changeStartBatchId': it is 8, and the last batch is 7",
        ),
        (
            {"readChangeFeed": True, "changeStartBatchId": 80},
            f"{INVALID}'changeStartBatchId': it is 80, and the last batch is 7",
        ),
    ],
)
def test_invalid_options_have_sparks_error_classes(flow: Flow, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=says):
        table(flow, **options)


def test_a_state_variable_must_be_named_where_there_are_several(flow: Flow) -> None:
    for options in ({}, {"readChangeFeed": "true", "changeStartBatchId": "1"}):
        given = {"path": flow.location, "operator": "op", **options}
        says = (
            r"^\[STDS_REQUIRED_OPTION_UNSPECIFIED\] 'stateVarName' must be specified: .* the state variables .*'total'"
        )
        for asked in (source_of, source_schema):
            with pytest.raises(InvalidStateStoreArgument, match=says):
                asked(SourceOptions.of(given))


def test_missing_batches_have_sparks_error_classes(flow: Flow) -> None:
    for options in ({"batchId": 8}, {"readChangeFeed": True, "changeStartBatchId": 1, "changeEndBatchId": 8}):
        with pytest.raises(VersionNotFoundError, match=r"^\[STDS_COMMITTED_BATCH_UNAVAILABLE\] Version 9 "):
            table(flow, **options)
