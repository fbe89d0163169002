"""Which partitions lag with their snapshots, and when that is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_actor.checkpoints.checkpoint_stats import SnapshotLag, SnapshotLagConf
from coordinator_actor.exceptions import InvalidRequestError

KEYS = [("op", p) for p in range(4)]
CONF = SnapshotLagConf(
    multiplier_for_min_version_diff_to_log=2,
    multiplier_for_min_time_diff_to_log=3,
    snapshot_lag_report_interval=100.0,
    max_lagging_stores_to_report=2,
    deltas_per_snapshot=5,
    maintenance_interval=10.0,
)
"""More than 10 versions and more than 30 s behind is too much."""


def lag(conf: SnapshotLagConf = CONF, base_version: int = 0, started: float = 0.0) -> SnapshotLag:
    return SnapshotLag("run", KEYS, started, base_version, conf)


def test_behind_in_versions_and_in_time_is_lagging() -> None:
    snapshots = lag()
    for key in KEYS:
        snapshots.report_uploaded(key, 20, 200.0)
    snapshots.report_uploaded(("op", 0), 25, 210.0)
    assert snapshots.lagging(30, 231.0) == []  # 10 versions, not more
    assert snapshots.lagging(31, 230.0) == []  # 30 s, not more
    found = snapshots.lagging(31, 231.0)
    assert [f.key for f in found] == KEYS[1:]
    assert (found[0].version, found[0].versions_behind, found[0].seconds_behind) == (20, 11, 31.0)
    assert [f.key for f in snapshots.lagging(36, 241.0)] == [*KEYS[1:], KEYS[0]]


def test_a_run_that_has_just_begun_does_not_lag() -> None:
    snapshots = lag(base_version=500, started=1000.0)
    assert snapshots.lagging(505, 1001.0) == []
    assert snapshots.lagging(511, 1031.0) and snapshots.lagging(511, 1031.0)[0].version is None
    assert snapshots.lagging(511, 1030.0) == []


def test_a_late_older_snapshot_changes_nothing() -> None:
    snapshots = lag()
    snapshots.report_uploaded(KEYS[0], 20, 200.0)
    snapshots.report_uploaded(KEYS[0], 15, 300.0)
    snapshots.report_uploaded(KEYS[0], 20, 300.0)
    assert snapshots.latest(KEYS[0]) == 20 and snapshots.latest(KEYS[1]) is None
    assert [f.seconds_behind for f in snapshots.lagging(31, 301.0) if f.key == KEYS[0]] == [101.0]


def test_a_partition_that_is_not_there_cannot_have_snapshots() -> None:
    with pytest.raises(InvalidRequestError, match="run has no partition op/9"):
        lag().report_uploaded(("op", 9), 1, 0.0)


def test_the_warning_names_the_furthest_behind() -> None:
    snapshots = lag()
    for partition, version in enumerate((30, 5, 12, 29)):
        snapshots.report_uploaded(("op", partition), version, float(version))
    text = snapshots.warning(31, 90.0)
    assert text is not None
    assert "queryRunId=run - Number of state stores falling behind: 2 of 4 at version 31" in text
    assert "op/1 (snapshot of version 5, 26 versions and 85 s behind), op/2 (snapshot of version 12," in text
    assert "op/0" not in text and "op/3" not in text and "more" not in text


def test_the_warning_is_not_long() -> None:
    text = lag().warning(31, 90.0)
    assert text is not None and "op/0 (no snapshot, 31 versions" in text and "op/1" in text
    assert "op/2" not in text and "and 2 more" in text
    none = lag(SnapshotLagConf(max_lagging_stores_to_report=0)).warning(100, 9e9)
    assert none is not None and "op/" not in none and ": 4 more" in none


def test_it_is_said_every_so_often() -> None:
    snapshots = lag()
    assert snapshots.warning(5, 0.0) is None
    said = [now for now in range(500, 1000) if snapshots.warning(60, float(now))]
    assert said == [500, 600, 700, 800, 900]
    assert snapshots.warning(60, 300.0), "a clock set back must not silence it"


def test_nothing_lags_where_it_is_switched_off() -> None:
    off = lag(SnapshotLagConf(coordinator_report_snapshot_upload_lag=False))
    assert off.lagging(10_000, 1e9) == [] and off.warning(10_000, 1e9) is None


def test_defaults_are_those_of_spark() -> None:
    conf = SnapshotLagConf()
    assert (conf.versions, conf.seconds) == (50, 600.0)
    assert (conf.snapshot_lag_report_interval, conf.max_lagging_stores_to_report) == (300.0, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multiplier_for_min_version_diff_to_log", 0),
        ("multiplier_for_min_time_diff_to_log", 0),
        ("deltas_per_snapshot", 0),
        ("snapshot_lag_report_interval", -1.0),
        ("maintenance_interval", -1.0),
        ("max_lagging_stores_to_report", -1),
    ],
)
def test_settings_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{name} must be .* not {value}"):
        SnapshotLagConf(**{name: value})


@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 60), st.floats(0, 300)), max_size=20),
    st.integers(0, 80),
    st.floats(0, 400),
)
def test_against_the_rule_itself(uploads: list[tuple[tuple[str, int], int, float]], latest: int, now: float) -> None:
    snapshots = lag()
    best = dict.fromkeys(KEYS, (0, 0.0))
    for key, version, moment in uploads:
        snapshots.report_uploaded(key, version, moment)
        if version > best[key][0]:
            best[key] = (version, moment)
    expected = {k for k, (version, moment) in best.items() if latest - version > 10 and now - moment > 30}
    found = snapshots.lagging(latest, now)
    assert {f.key for f in found} == expected and len(found) == len(expected)
    behind = [(f.versions_behind, f.seconds_behind) for f in found]
    assert behind == sorted(behind, reverse=True)
