"""A query with two operators by ``user``, ``totals`` and ``profile``, whose hosts answer for feature views."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from coordinator_actor.feature_views import Feature, FeatureView
from coordinator_actor.messages import OperatorSpec
from spark_bridge.transport.protocol import TaskIdentity
from tests.spark_bridge.host.host_steps import opened
from tests.spark_bridge.queryable.client_world import KEYS, TOTALS, Cluster, G

PROFILE = StateSchema(
    KEYS,
    pa.schema([("score.last.value", pa.float64()), ("level.last.value", pa.int64()), ("vip.last.value", pa.bool_())]),
)
SCHEMAS = {"totals": TOTALS, "profile": PROFILE}
VIEW = FeatureView(
    "risk",
    entity="user",
    features=[
        Feature("n", "totals", default=0),
        Feature("score", "profile"),
        Feature("user_name", "totals", column="name", default="unknown"),
        Feature("level", "profile"),
    ],
    owner="fraud",
    description="What a model knows of a user.",
)


class FeatureCluster(Cluster):
    """The cluster; a batch writes rows of both operators. The coordinator's clock is the real one at each batch."""

    def __init__(self, root: Path, schemas: Mapping[str, StateSchema] = SCHEMAS, **options: Any) -> None:
        self.schemas = schemas
        self.key_groups = G
        super().__init__(root, **options)

    def start(self, run: str, operators: Mapping[str, OperatorSchema] | None = None) -> None:
        super().start(run, {name: OperatorSchema.of_rows(schema) for name, schema in self.schemas.items()})

    @contextmanager
    def other_query(self, schemas: Mapping[str, StateSchema], key_groups: int) -> Iterator[None]:
        """Within it, all methods are about another query, ``other``, which starts."""
        before = {name: getattr(self, name) for name in ("run", "version", "checkpoint", "schemas", "key_groups")}
        specs = tuple(
            OperatorSpec(name, self.partitions, OperatorSchema.of_rows(schema).to_json(), backend="file")
            for name, schema in schemas.items()
        )
        self.run, self.version, self.checkpoint = "other-run", 0, "other"
        self.schemas, self.key_groups = schemas, key_groups
        place = str(self.root / "other")
        registration = self.world.registration(
            "other-run",
            operators=specs,
            key_groups=key_groups,
            query_id="q2",
            name="other",
            checkpoint_location=place,
            state_location=f"{place}/statestore",
        )
        assert self.c.register_query(registration).refusal is None
        yield
        for name, value in before.items():
            setattr(self, name, value)

    def write(
        self, rows: Mapping[str, Mapping[int, tuple[Any, ...]]], *, ago: float = 0.0, committed: bool = True
    ) -> int:
        """A batch; returns the version, which was made ``ago`` seconds ago. Unless ``committed`` it is prepared."""
        self.world.now = time.time() - ago
        batch = self.version
        self.world.plan_spark(batch, self.checkpoint)
        for operator, schema in self.schemas.items():
            of_operator = rows.get(operator, {})
            keys = pa.record_batch([pa.array(list(of_operator), pa.int64())], schema=KEYS)
            groups = key_groups(keys, self.key_groups)
            states = pa.record_batch(
                [pa.array([v[i] for v in of_operator.values()], f.type) for i, f in enumerate(schema.value)],
                schema=schema.value,
            )
            stored, values = encode_keys(keys, groups), schema.encode_values(states)
            for p in range(self.partitions):
                own = pa.array(groups * self.partitions // self.key_groups == p, pa.bool_())
                pairs = SortedPairs.last_wins(stored.filter(own), values.filter(own))
                task = TaskIdentity(self.run, operator, p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
                (owner,) = [h for h in self.hosts if opened(h.host, task).redirect is None]
                owner.host.commit(task, Changes({"default": pairs}), {})
        if committed:
            self.world.commit_spark(batch, self.checkpoint)
            self.version += 1
            self.complete()
        return self.version

    def declare(self, view: FeatureView = VIEW) -> None:
        self.c.declare_view(self.run, view)
