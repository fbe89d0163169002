"""Requests to storage are timed, and those that fail are counted, repeated ones too."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestCounts


def test_failures_and_durations_are_counted_by_kind(tmp_path: Path) -> None:
    requests = RequestCounts()
    storage = CheckpointStorage.open(str(tmp_path), requests=requests)
    storage.put_new("a", b"1")
    assert requests.failures() == dict.fromkeys(requests.read(), 0)
    assert {kind: b.count for kind, b in requests.durations().items()} == requests.read()
    with pytest.raises(StorageError):
        storage.put_new("a/b", b"1")  # a is a file, no directory
    assert requests.failures() == {**dict.fromkeys(requests.read(), 0), "put": 1}
    assert {kind: b.count for kind, b in requests.durations().items()} == requests.read()
