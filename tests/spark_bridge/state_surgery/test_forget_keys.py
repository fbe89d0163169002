"""Forgotten keys are in no version and in no byte of a checkpoint; all else stays, and the query goes on."""

from __future__ import annotations

import base64
import copy
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.durable.audit_log import AuditLog
from coordinator_actor.reading.stored_files import stored_files
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.state_data.state_tables import state_table
from spark_bridge.state_surgery.forget_keys import forget_keys
from tests.effort import effort
from tests.spark_bridge.state_flows import NAMES, Flow, Key
from tests.spark_bridge.variable_operations import flat, in_order, random_operation

BACKENDS = ("rocksdb", "file")


def unlikely(rng: random.Random) -> str:
    """A name that no other bytes are by chance, and that nothing compresses."""
    return "".join(rng.choices(string.ascii_letters + string.digits, k=24))


class Clicks:
    """A stream over some keys with names of their own, with snapshots and removals in between."""

    def __init__(self, root: Path, backend: str, n: int = 2) -> None:
        self.rng = random.Random(7)
        self.names = [unlikely(self.rng) for _ in range(12)]
        self.flow = Flow(root, n=n, backend=backend)

    @property
    def keys(self) -> list[Key]:
        return [(name, shard) for name in self.names for shard in (0, 1)]

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.flow.batch({key: random_operation(self.rng) for key in self.rng.sample(self.keys, 9)})

    def snapshots(self) -> None:
        """Take a snapshot of each partition, which the next manifest names."""
        for upload in self.flow.host.maintenance.do_maintenance():
            upload.result()

    def again(self, run: str, n: int, backend: str) -> None:
        self.flow = self.flow.restarted(run, n, backend)

    def expect_forgotten(self, names: list[str]) -> None:
        """The model forgets, too: in all versions."""
        for held in self.flow.at.values():
            for of in held.values():
                for key in [key for key in of if key[0] in names]:
                    del of[key]
        for name in NAMES:
            of = getattr(self.flow.model, name).of
            for key in [key for key in of if key[0] in names]:
                del of[key]

    def check(self) -> None:
        """Every version that can be read holds what the model holds."""
        there = StateVersions.look(find_state(self.flow.location)).readable
        for version in (v for v in there if v):
            # All versions are read by changelogs that follow each other: of some, all is compared.
            if version in effort((there[0], there[len(there) // 2], there[-1]), there):
                for name in NAMES:
                    table = state_table(self.flow.location, "op", name, version)
                    rows = list(zip(*(table.column(i).to_pylist() for i in range(table.num_columns - 2)), strict=True))
                    assert in_order(rows) == in_order(flat(name, self.flow.at[version][name])), (version, name)


@pytest.fixture
def clicks(tmp_path: Path) -> Iterator[Callable[..., Clicks]]:
    made: list[Clicks] = []

    def make(*args: Any) -> Clicks:
        made.append(Clicks(tmp_path, *args))
        return made[-1]

    yield make
    for one in made:
        one.flow.close()


def patterns_of(name: str) -> list[bytes]:
    """The bytes of a name, and what they are in base64, in which descriptors hold small files."""
    made = [base64.b64encode(bytes(before) + name.encode())[4:-4] for before in range(3)]
    return [name.encode(), *made]


def files_with(location: str, name: str) -> list[str]:
    """The files in which the bytes of a name are."""
    patterns = patterns_of(name)
    return [
        str(path.relative_to(location))
        for path in sorted(Path(location).rglob("*"))
        if path.is_file() and any(pattern in path.read_bytes() for pattern in patterns)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_version_and_no_byte_has_a_forgotten_key_and_the_query_goes_on(clicks, backend):
    stream = clicks(backend)
    stream.run(4)
    stream.snapshots()
    stream.run(13)
    stream.snapshots()
    stream.run(2)
    stream.flow.stop()
    gone, stays = stream.names[:2], stream.names[2:]
    before = {name: files_with(stream.flow.location, name) for name in gone}
    for found in before.values():  # the search finds them where they are
        assert any(f.endswith((".changelog", ".changelogs")) for f in found)
        assert any(f.endswith((".sst", ".snapshots", ".snapshot", ".part")) for f in found)
    versions = StateVersions.look(find_state(stream.flow.location)).readable

    steps: list[str] = []
    keys = [(name, shard) for name in gone for shard in (0, 1)]
    report = forget_keys(stream.flow.location, "op", keys, reference="request 12", progress=steps.append)

    assert {name: files_with(stream.flow.location, name) for name in gone} == {name: [] for name in gone}
    assert all(files_with(stream.flow.location, name) for name in stays)
    assert report.keys == 4 and report.rows > 0 and report.files > 0 and steps
    assert StateVersions.look(find_state(stream.flow.location)).readable == versions, "all versions stay"
    stream.expect_forgotten(gone)
    stream.check()
    there = StateVersions.look(find_state(stream.flow.location))
    assert not [f.path for f in stored_files(there) if not f.kept_by and f.kind != "manifest"], (
        "what nothing keeps is removed"
    )
    begun, done = AuditLog(stream.flow.world.storage(f"{stream.flow.location}/statestore", {})).read()
    assert (begun.status, done.status, done.reference, done.counts["keys"]) == ("begun", "done", "request 12", 4)

    stream.again("run2", 2, backend)
    stream.run(2)
    stream.snapshots()
    stream.run(1)
    stream.check()
    stream.flow.stop()
    forget_keys(stream.flow.location, "op", [(stays[0], 0)])  # the first exchange is part of the second one
    stream.flow.model = copy.deepcopy(stream.flow.model)
    for held in [*stream.flow.at.values(), {name: getattr(stream.flow.model, name).of for name in NAMES}]:
        for of in held.values():
            of.pop((stays[0], 0), None)
    stream.again("run3", 3, BACKENDS[1 - BACKENDS.index(backend)])
    stream.run(1)
    stream.check()
