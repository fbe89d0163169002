"""The table of metrics keeps Prometheus's rules, and Ray takes each metric with its labels; without a cluster."""

from __future__ import annotations

import re

import pytest

from coordinator_actor import actor
from coordinator_actor.actor import RayMetrics
from coordinator_actor.metrics import COUNTER, DRIVER, GAUGE, HOST, METRICS, Metric

OF_SPARK = "statestore_operator_"


def own_labels(metric: Metric) -> dict[str, str]:
    return {"namespace": "n", **({"host": "h"} if metric.role == HOST else {})}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_names_keep_prometheus_rules(metric: Metric) -> None:
    assert re.fullmatch(r"statestore_[a-zA-Z_]+", metric.name)
    assert metric.help.endswith(".") and len(metric.help) > 20
    assert metric.name.endswith(("_total", "_bucket")) == (metric.kind == COUNTER)
    if not metric.name.startswith(OF_SPARK):
        assert not re.search(r"_(ms|millis|kb|mib)(_|$)", metric.name), "base units: seconds and bytes"
    assert "namespace" not in metric.labels


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_ray_takes_each(metric: Metric) -> None:
    sink = RayMetrics(own_labels(metric))
    labels = {name: "x" for name in metric.labels if name not in own_labels(metric)}
    if metric.kind == GAUGE:
        sink.set(metric.name, 1.5, **labels)
    elif metric.kind == COUNTER:
        sink.increase(metric.name, 0, **labels)
        sink.increase(metric.name, 2, **labels)
    else:
        sink.observe(metric.name, 0.25, **labels)
    if labels and metric.kind == GAUGE:
        with pytest.raises(ValueError, match="Missing value for tag"):
            sink.set(metric.name, 1.0)


def test_a_name_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(KeyError):
        RayMetrics({"namespace": "n"}).set("statestore_nothing", 1.0)


def test_series_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    class Counted(actor.Gauge):
        def __init__(self, name: str, *rest: object) -> None:
            made.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(actor, "Gauge", Counted)
    sink = RayMetrics({"namespace": "n"})
    for hosts in (1, 2):
        sink.set("statestore_hosts", hosts)
    assert made == ["statestore_hosts"]


def test_roles_are_three() -> None:
    assert {m.role for m in METRICS.values()} == {"coordinator", HOST, DRIVER}
