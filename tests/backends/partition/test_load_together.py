"""Small changelogs of a load are applied together: the result is the same as one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.formats.changelog import ChangelogMeta, Changes, GroupMember, group_path, read_changelog, write_group
from backends.formats.manifest import ChangelogRef, Lineage
from backends.partition import loading
from backends.partition.loading import ChangelogReads
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.object_files import ALONE, SharedObjects
from tests.backends.partition.partition_steps import commit

VERSIONS = 9
Pairs = dict[str, dict[bytes, bytes | None]]


def _random_steps(seed: int) -> list[Pairs]:
    """Return changes of few keys that are put, removed and put again, in families; one family begins without pairs."""
    rng = np.random.default_rng(seed)
    steps: list[Pairs] = []
    for version in range(1, VERSIONS + 1):
        step: Pairs = {"default": {}, "other": {}} if version == 3 else {"default": {}}
        for name in ("default", "other") if version > 4 else ("default",):
            drawn = rng.choice(12, rng.integers(1, 8), replace=False)
            step[name] = {b"k%d" % k: None if rng.random() < 0.4 else b"%d" % version for k in drawn}
        steps.append(step)
    return steps


def _stored(root: Path, storage: CheckpointStorage, conf: StateStoreConf, steps: Sequence[Pairs]) -> Lineage:
    state = open_partition(root / "first", storage, "operators/op/1/0", conf)
    refs = [ChangelogRef(*commit(state, step["default"], **_others(step))) for step in steps]
    state.close()
    return Lineage(len(steps), tuple(refs))


def _others(step: Pairs) -> Pairs:
    return {name: pairs for name, pairs in step.items() if name != "default"}


def _rows(state: PartitionState) -> dict[str, list[tuple[bytes, bytes]]]:
    return {
        family: [
            (row["key"], row["value"]) for batch in state.reads.scan(column_family=family) for row in batch.to_pylist()
        ]
        for family in sorted(state.reads.column_families())
    }


@pytest.mark.parametrize("provider", ["rocksdb", "file"])
@pytest.mark.parametrize("seed", range(4))
def test_changelogs_that_are_applied_together_lead_to_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, seed: int
) -> None:
    storage = CheckpointStorage.open(f"memory://together-{provider}-{seed}/ck")
    conf = StateStoreConf(provider=provider)
    lineage = _stored(tmp_path, storage, conf, _random_steps(seed))
    found = []
    for most in 0, 1 << 6, 1 << 20:  # one by one, a few at a time, all at once
        monkeypatch.setattr(loading, "REPLAYED_BYTES", most)
        state = open_partition(tmp_path / str(most), storage, "operators/op/1/0", conf)
        state.load(lineage)
        rows = _rows(state)
        assert state.reads.num_keys() == sum(map(len, rows.values()))
        found.append((state.version, state.head, rows))
        state.close()
    assert found[0] == found[1] == found[2]
    assert set(found[0][2]) == {"default", "other"} and found[0][2]["default"]


def test_small_changelogs_are_one_change_of_the_engine_and_large_ones_go_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage.open("memory://together-sizes/ck")
    conf = StateStoreConf(provider="file")
    large: Pairs = {"default": {b"large": bytes(1000)}}
    steps: list[Pairs] = [{"default": {b"a": b"1"}}, {"default": {b"a": b"2"}}, large, {"default": {b"a": b"3"}}]
    lineage = _stored(tmp_path, storage, conf, steps)
    monkeypatch.setattr(loading, "REPLAYED_BYTES", 1000)
    state = open_partition(tmp_path / "second", storage, "operators/op/1/0", conf)
    applied: list[int] = []
    when_decoded: list[int] = []
    engine: StateEngine = state._engine
    prepare = engine.prepare

    def noted(changes: Changes):  # type: ignore[no-untyped-def]
        applied.append(changes.num_changes)
        return prepare(changes)

    def decoded(data: bytes, name: str) -> tuple[ChangelogMeta, Changes]:
        when_decoded.append(len(applied))
        return read_changelog(data, name)

    monkeypatch.setattr(engine, "prepare", noted)
    monkeypatch.setattr(loading, "read_changelog", decoded)
    state.load(lineage)
    assert applied == [1, 1, 1] and when_decoded == [0, 0, 0, 2]
    assert state.reads.get_one(b"a") == b"3"
    state.close()


def test_a_changelog_that_another_load_has_read_for_all_needs_no_thread() -> None:
    storage = CheckpointStorage.open("memory://together-shared/ck")
    members = [
        GroupMember(ChangelogMeta("run", "op", p, 2, 1, "a", None), f"operators/op/2/{p}/1-x.changelog", b"%d" % p)
        for p in range(2)
    ]
    path = group_path(1)
    data, refs = write_group(path, members)
    storage.put_new(path, data)
    shared = storage.shared = SharedObjects(lambda nbytes, drop: object())
    read = []
    with ExitStack() as loads:
        for _ in range(ALONE + 1):
            loads.enter_context(shared.loading())
        for ref in refs:
            with ChangelogReads(storage, [ChangelogRef(1, ref)], 4) as reads:
                (content,) = [data for _, data in reads]
                read.append((content, reads._pool is None))
    assert read == [(b"0", False), (b"1", True)]
