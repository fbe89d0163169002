"""Programs that resume from stored state with other state variables: the schemas they get, and refused changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.encoding.schema import StateSchema
from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry
from backends.storage.locations import FileRef
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import LineageError
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.run import compatibility
from coordinator_actor.run.compatibility import evolved_operators
from coordinator_actor.run.query_state import QueryState
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.coordinator_actor.savepoints.savepoint_streams import G, Stream

KEY = pa.schema([("k", pa.int64())])
COUNTS = StateSchema(KEY, pa.schema([("n", pa.int32())]))
WIDER = StateSchema(KEY, pa.schema([("n", pa.int64()), ("at", pa.timestamp("us"))]))
TEXTS = StateSchema(KEY, pa.schema([("n", pa.string())]))


def program(*variables: StateVariable) -> OperatorSchema:
    return OperatorSchema(variables, ("k",), {"time_mode": "none"})


def value(name: str, state: StateSchema = COUNTS) -> StateVariable:
    return StateVariable(name, "value", {name: state})


def refusal_of(run: QueryState) -> str | None:
    return compatibility.refusal_of(run, run.manifests.query_file(), None)


class Query:
    """A query's durable record, and the runs that resume from it, one batch each."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self.version = 0

    def run(self, *schemas: OperatorSchema | str, run_id: str = "run") -> QueryState:
        texts = [s if isinstance(s, str) else s.to_json() for s in schemas]
        specs = tuple(OperatorSpec(f"op{i}", 1, text) for i, text in enumerate(texts))
        registration = self.world.registration(run_id, operators=specs)
        log = ManifestLog(self.world.storage(registration.state_location, {}), "c")
        log.refresh()
        spark = SparkCommits(self.world.storage(registration.checkpoint_location, {}))
        run = QueryState(registration, log, spark, lambda: 0.0)
        run.versions.load(run.manifests.chain(), self.version)
        return run

    def go_on(self, *schemas: OperatorSchema | str) -> list[OperatorSchema]:
        """Run a batch of this program; return the schemas that it resumed with."""
        run = self.run(*schemas)
        assert refusal_of(run) is None, refusal_of(run)
        made = evolved_operators(run)
        for spec in made:
            run.manifests.ensure_schema(OperatorSchema.from_json(spec.schema).id, spec.schema)
        run.manifests.claim(run.run_id)
        operators = {}
        for spec in made:
            changes = FileRef(f"operators/{spec.name}/1/0/default/1-x.changelog", 1, "d")
            held = {0: PartitionEntry("t", changes)}
            operators[spec.name] = OperatorEntry.of(1, OperatorSchema.from_json(spec.schema).id, "rocksdb", held)
        below = run.versions.chain.get(self.version)
        self.version += 1
        manifest = Manifest(
            id=self.version,
            parent=below.id if below else None,
            version=self.version,
            epoch=run.manifests.epoch,
            run_id=run.run_id,
            created_ms=0,
            operators=operators,
            oldest=0,
            chain_from=1,
        )
        run.manifests.append(manifest, CheckpointIDCounter())
        # Asked again, by a coordinator that was restarted: from the program, and from what hosts report.
        for given in (schemas, tuple(s.schema for s in made)):
            again = self.run(*given)
            assert refusal_of(again) is None and [o.schema for o in evolved_operators(again)] == [
                o.schema for o in made
            ]
        return [OperatorSchema.from_json(s.schema) for s in made]


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_a_new_query_gets_what_it_declares(query: Query) -> None:
    declared = program(value("a"), value("b"))
    assert query.go_on(declared, SCHEMA) == [declared, OperatorSchema.from_json(SCHEMA)]
    assert evolved_operators(query.run(declared, SCHEMA))[1].schema == SCHEMA


def test_schema_changes_of_a_program_are_applied_and_recorded(query: Query) -> None:
    query.go_on(program(value("a"), value("b")), SCHEMA)
    (made, rows) = query.go_on(program(value("a", WIDER), value("c")), SCHEMA)
    assert made.variable("a").families["a"] == StateSchema(KEY, WIDER.value, (COUNTS.value,))
    assert [v.name for v in made.variables] == ["a", "b", "c"] and rows.to_json() == SCHEMA
    deletion = StateVariable("a", "value", {}, deleted=True)
    (made, _) = query.go_on(program(deletion, value("b")), SCHEMA)
    (made, _) = query.go_on(program(value("a", TEXTS)), SCHEMA)
    assert dict(made.variable("a").families) == {"a.-2": TEXTS}
    stored = {path.stem for path in (query.world.root / "ck/statestore/schemas").iterdir()}
    assert made.id in stored and len(stored) == 5


def test_nothing_but_the_schema_changes(query: Query) -> None:
    query.go_on(program(value("a")))
    run = query.run(program(value("a", WIDER)))
    (before,), (after,) = run.registration.operators, evolved_operators(run)
    assert msgspec.structs.replace(after, schema=before.schema) == before and after.schema != before.schema


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (program(value("a", TEXTS)), ["'op0'", "'a'", "(n integer)", "(n string)", "Restore", "statestore"]),
        (program(StateVariable("a", "list", {"a": COUNTS})), ["'op0'", "value a:", "list a:", "VARIABLE_TYPE_CHANGE"]),
        (OperatorSchema((value("a"),), ("k",), {"time_mode": "eventtime"}), ["time_mode", "'none'", "'eventtime'"]),
        (SCHEMA, ["'op0'", "value a:", "rows default:"]),
    ],
)
def test_an_incompatible_program_is_refused_with_both_sides(query: Query, declared: Any, words: list[str]) -> None:
    query.go_on(program(value("a")))
    refusal = refusal_of(query.run(declared))
    assert refusal is not None
    assert [w for w in words if w not in refusal] == [], refusal


def test_a_program_is_rolled_back_if_spark_has_not_committed_its_batch(query: Query) -> None:
    """What only versions have that are given up counts for nothing: neither their schemas, nor what was deleted."""
    (first,) = query.go_on(program(value("a")))
    query.go_on(program(value("a", WIDER), StateVariable("b", "value", {}, deleted=True)))
    query.version = 1
    assert refusal_of(query.run(program(value("a")))) is None
    assert query.go_on(program(value("a"))) == [first]
    query.version = 1
    query.go_on(program(StateVariable("a", "value", {}, deleted=True), value("b")))
    query.version = 1
    (again,) = query.go_on(program(value("a")))
    assert again.variable("a").family("a") == "a"


def test_rows_of_an_operator_must_stay_as_they_are(query: Query) -> None:
    """Kept together with an index, as sessions are."""
    index = StateSchema(pa.schema([("end", pa.int64())]), pa.schema([]))
    both = StateVariable("default", "rows", {"default": COUNTS, "default.-ends": index})
    query.go_on(OperatorSchema((both,)))
    for other, words in ((index, "(k long)"), (WIDER, "(n integer)")):
        families = {"default": other if other is WIDER else COUNTS, "default.-ends": COUNTS}
        refusal = refusal_of(query.run(OperatorSchema((StateVariable("default", "rows", families),))))
        assert refusal is not None and words in refusal and "Restore" in refusal


def test_a_restarted_coordinator_gives_the_run_the_same_schemas(stream: Callable[..., Stream]) -> None:
    """Hosts report the run with the schemas they got, the driver registers it again with those of the program."""

    def start(run_id: str, declared: OperatorSchema) -> None:
        spec = OperatorSpec("op", s.n, declared.to_json(), "file")
        s.registration = s.world.registration(run_id, n=s.n, operators=(spec,), key_groups=G)
        s.register()

    def granted() -> str:
        return s.c.locate("op", None).operator.schema

    s = stream(0)
    start("first", program(value("a"), value("b")))
    s.batch(0)
    declared = program(value("a", WIDER), StateVariable("b", "value", {}, deleted=True), value("b", TEXTS))
    start("second", declared)
    expected = evolved(program(value("a"), value("b")), declared)
    assert expected.variable("b").family("b") == "b.-2"
    for batch in (1, 2):
        s.restart_coordinator()
        assert granted() == expected.to_json()
        s.batch(batch)
        assert granted() == expected.to_json()
    log = s.log()
    head = log.head()
    assert head is not None and log.schema(head.operators["op"].schema_id) == expected.to_json()
    start("third", program())
    assert granted() == expected.to_json()


@pytest.mark.parametrize("remedy", ["Restore the old declaration", "replace it with a state variable of another name"])
def test_the_remedy_for_a_refused_declaration_works(query: Query, remedy: str) -> None:
    query.go_on(program(value("a")))
    refusal = refusal_of(query.run(program(value("a", TEXTS))))
    assert refusal is not None and remedy in refusal
    query.go_on(program(value("a") if remedy.startswith("Restore") else value("another", TEXTS)))


def test_a_run_overtaken_by_another_program_is_restarted_as_its_error_says(tmp_path: Path) -> None:
    world = World(tmp_path)

    def start(run_id: str, declared: OperatorSchema) -> tuple[Coordinator, int]:
        c = world.coordinator()
        spec = OperatorSpec("op", 2, declared.to_json())
        answer = c.register_query(world.registration(run_id, operators=(spec,)))
        assert answer.refusal is None, answer.refusal
        return c, answer.completed_version

    older, _ = start("run1", program(value("a")))
    world.plan_spark(0)
    world.run_batch(older, 0)
    world.plan_spark(1)
    for partition in range(2):
        world.stage(world.open(older, 1, partition), partition, 1, "t")
    newer, _ = start("run2", program(value("a", WIDER)))
    world.commit_spark(1)  # by the older driver, which does not know of the newer one
    with pytest.raises(LineageError, match=r"another schema of operator 'op'\. Start the query again"):
        newer.batch_committed("run2", 1)
    again, completed = start("run3", program(value("a", WIDER)))
    assert completed == 2
    world.plan_spark(2)
    world.run_batch(again, 2, run="run3")
    assert again.batch_committed("run3", 2)
