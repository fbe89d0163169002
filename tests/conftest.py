"""Order of the suite: what needs no cluster first, so that simple mistakes show within seconds."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.backends.storage.s3_faults import FaultProxy, S3Server, fault_proxy, s3_server
from tests.effort import IS_THOROUGH, effort, examples
from tests.scratch import SCRATCH
from tests.services.hadoop import Hdfs, running_hdfs
from tests.services.kafka import KafkaBroker, running_kafka

os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", SCRATCH)

# Each process of the suite would start a thread per core for matrices that no test has.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Nothing that is imported and collected is garbage: to look for some would take a tenth of the time.
gc.disable()

settings.register_profile("suite", max_examples=examples(100), deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def scratch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without clusters, put files for which no directory is given next to the tests' own: RocksDB syncs them often.

    Runs with clusters keep the usual directory: machines of a lab share no memory.
    """
    if any(item.get_closest_marker("ray") or item.get_closest_marker("spark") for item in request.session.items):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("scratch"))
        patch.setenv("TMPDIR", place)  # of processes that tests start
        patch.setattr(tempfile, "tempdir", place)
        yield


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[S3Server, FaultProxy]]:
    """One S3 server for all tests of a process, and a proxy before it: it takes longer to start than most tests."""
    with s3_server() as server, fault_proxy(server) as proxy:
        yield server, proxy


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """One HDFS for all tests of a process. Each leaves all its nodes running."""
    with running_hdfs(tmp_path_factory.mktemp("hdfs")) as service:
        yield service


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One broker for all tests of a process."""
    with running_kafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


def pytest_configure(config: pytest.Config) -> None:
    # Clean-ups run last to first: this one is last.
    config.add_cleanup(_unfreeze_for_duckdb)


def _unfreeze_for_duckdb() -> None:
    """DuckDB's binding lists as leaked what is frozen at the end; to look through all of that takes half a second."""
    if "duckdb" in sys.modules:
        gc.unfreeze()


def pytest_report_header() -> str:
    return "effort: " + effort("usual; STATESTORE_TEST_EFFORT=thorough runs the tests marked thorough too", "thorough")


def _out_of_turn(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests marked ``in_turns`` that a usual run leaves to a thorough one.

    The mark names two values of a parameter. Of the tests that have both values, the first test takes the first value,
    the next test the second, and so on in the order of the file.
    """
    pairs: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        for value in mark.args if (mark := item.get_closest_marker("in_turns")) else ():
            words = re.split(r"[][-]", item.nodeid)
            if value in words:
                words[words.index(value)] = ""
                pairs.setdefault("-".join(words), {}).setdefault(value, item)
    both = [tuple(pair.values()) for pair in pairs.values() if len(pair) == 2]
    return {pair[1 - i % 2] for i, pair in enumerate(both)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not IS_THOROUGH and "thorough" not in config.option.markexpr:
        others = _out_of_turn(items)
        left = [item for item in items if item.get_closest_marker("thorough") or item in others]
        if left:
            config.hook.pytest_deselected(items=left)
            out = set(left)
            items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: 2 if item.get_closest_marker("spark") else 1 if item.get_closest_marker("ray") else 0)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What was imported and collected stays to the end: no collection of garbage by a test looks through it again.
    gc.freeze()
    gc.enable()
    # Tests make much and keep little: with Python's own thresholds, a tenth of their time goes to looking for cycles.
    gc.set_threshold(100_000, 20, 50)
