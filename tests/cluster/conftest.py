"""Labs of machines for tests; where this process can make none, tests that ask for one are skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab.lab import Lab
from tests.lab.namespaces import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("cluster"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def make_lab() -> Iterator[Callable[[int], Lab]]:
    """Make labs of so many machines; each ends with the test."""
    with ExitStack() as labs:
        yield lambda machines: labs.enter_context(Lab(machines))
