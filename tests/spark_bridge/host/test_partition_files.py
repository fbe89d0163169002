"""Where a host keeps partitions, and over which storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from backends.conf import StateStoreConf
from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge.host.instances import PartitionFiles
from tests.coordinator_actor.coordinator_world import World


def test_the_partitions_of_a_query_share_one_storage_and_other_options_have_another(tmp_path: Path) -> None:
    opened: list[tuple[str, dict[str, str]]] = []

    def open_storage(location: str, options: Mapping[str, str]) -> CheckpointStorage:
        opened.append((location, dict(options)))
        return CheckpointStorage.open(location)

    files = PartitionFiles(tmp_path / "local", "a", StateStoreConf(fsync=False), open_storage)
    of = World(tmp_path).registration("run1")
    (spec,) = of.operators
    other = msgspec.structs.replace(of, storage_options={"fs.s3a.access.key": "new"})
    states = [files.open_own(of, spec, 0, set), files.open_own(of, spec, 1, set)]
    states.append(files.open_copy(of, "copied", spec.backend, tmp_path / "copy"))
    assert opened == [(of.state_location, {})]
    states.append(files.open_copy(other, "copied", spec.backend, tmp_path / "other"))
    assert opened[1:] == [(of.state_location, {"fs.s3a.access.key": "new"})]
    for state in states:
        state.close()
