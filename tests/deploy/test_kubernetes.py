"""The chart and the manifests made from it: Kubernetes', KubeRay's and the Prometheus operator's kinds, strictly.

With ``KUBERAY_CRDS``, a directory with the operator's CRD files (``ray-operator/config/crd/bases`` of KubeRay), what
the chart makes is held against these as well.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from spark_bridge.grafana import FILE_NAME, dashboard
from spark_bridge.state_http.serve_app import Settings
from tests.deploy.kuberay import MODELS
from tests.deploy.rendered_chart import (
    CHART,
    MANIFESTS,
    MISSING,
    ROOT,
    RULES,
    can_render,
    chart_files,
    documents,
    manifests,
    render,
    renderer,
)
from tests.effort import effort

KUBERNETES = "1.34"
CRDS = os.environ.get("KUBERAY_CRDS", "")
VALUES = {"default": (), **{path.stem.removesuffix("-values"): (path,) for path in sorted(CHART.glob("ci/*.yaml"))}}
REFUSED = (ValidationError, kubernetes_validate.ValidationError, jsonschema.ValidationError)
FREE = {"labels", "annotations", "matchLabels", "nodeSelector", "requests", "limits", "stringData", "rayStartParams"}
"""Maps whose keys users choose."""

needs_go = pytest.mark.skipif(not can_render(), reason=MISSING)


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # 5 MB of JSON for each document otherwise
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield
    if renderer.cache_info().currsize:
        shutil.rmtree(renderer().parent)


def pod_templates(document: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in a document."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "template":
                yield value
            else:
                yield from pod_templates(value)
    elif isinstance(document, list):
        for value in document:
            yield from pod_templates(value)


def check(document: dict[str, Any]) -> None:
    """Raise one of ``REFUSED`` if a field is unknown or of another type."""
    model = MODELS.get(document.get("kind", ""))
    if model is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    model.model_validate(document)
    for template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def misspelt(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a document, each with one field misspelt, by the path of the field."""

    def paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield (*path, key)
                if key not in FREE:
                    yield from paths(inner, (*path, key))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                yield from paths(inner, (*path, i))

    for path in [*paths(document, ())]:
        wrong = copy.deepcopy(document)
        place = wrong
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        yield ".".join(map(str, path)), wrong


@needs_go
@pytest.mark.parametrize("values", VALUES)
def test_output_of_the_chart_is_valid(values: str) -> None:
    made = documents(render(*VALUES[values]))
    for document in made:
        check(document)
    kinds = {document["kind"] for document in made}
    assert {"RayCluster", "RayJob", "RayService"} & kinds and "ServiceAccount" in kinds


@pytest.mark.parametrize(
    "path", sorted(p for p in MANIFESTS.glob("*.yaml") if "values" not in p.name), ids=lambda p: p.stem
)
def test_manifests_are_valid_and_a_misspelt_field_is_not(path: Path) -> None:
    count = 0
    for document in documents(path.read_text()):
        check(document)
        # A usual run tries each third field: a model that accepts one unknown field accepts all of them.
        for field, wrong in islice(misspelt(document), 0, None, effort(3, 1)):
            with pytest.raises((*REFUSED, KeyError)):
                check(wrong)
                pytest.fail(f"{document['kind']}: {field} misspelt is accepted")
            count += 1
    assert count > effort(35, 100)


@needs_go
def test_manifests_are_those_of_the_chart() -> None:
    for name, text in manifests().items():
        assert (MANIFESTS / name).read_text() == text, "run make manifests"


def test_the_charts_files_are_the_dashboard_and_the_alerts() -> None:
    for path, text in chart_files().items():
        assert path.read_text() == text, "run make manifests"


@needs_go
def test_the_chart_brings_dashboard_and_alerts_where_they_are_asked_for() -> None:
    made = {document["kind"]: document for document in documents(render(CHART / "ci/job-values.yaml"))}
    assert json.loads(made["ConfigMap"]["data"][FILE_NAME]) == dashboard()
    assert made["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["PrometheusRule"]["spec"] == yaml.safe_load(RULES.read_text())
    assert made["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"
    assert not {"ConfigMap", "PrometheusRule"} & {document["kind"] for document in documents(render())}


@needs_go
@pytest.mark.parametrize("values", VALUES)
def test_names_and_ports_match(values: str) -> None:
    """Selectors choose the pods that they are for; accounts, Secrets and ports that are named exist."""
    made = documents(render(*VALUES[values]))
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for document in made:
        by_kind.setdefault(document["kind"], []).append(document)
    pods = list(pod_templates(made))
    assert [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods] == ["head", "worker"]

    def chosen(selector: dict[str, Any]) -> list[str]:
        wanted = selector["matchLabels"].items()
        found = [pod["metadata"]["labels"] for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        return [labels["app.kubernetes.io/component"] for labels in found]

    ports = [{p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]} for pod in pods]
    for policy in by_kind.get("NetworkPolicy", []):
        assert chosen(policy["spec"]["podSelector"]) == ["head", "worker"]
        assert chosen(policy["spec"]["ingress"][0]["from"][0]["podSelector"]) == ["head", "worker"]
        assert policy["spec"]["ingress"][1]["ports"] == [{"port": ports[0]["dashboard"], "protocol": "TCP"}]
    for budget in by_kind.get("PodDisruptionBudget", []):
        assert [budget["metadata"]["name"].rpartition("-")[2]] == chosen(budget["spec"]["selector"])
    for monitor in by_kind.get("PodMonitor", []):
        assert chosen(monitor["spec"]["selector"]) == ["head", "worker"]
        assert all(monitor["spec"]["podMetricsEndpoints"][0]["port"] in named for named in ports)
    (account,) = by_kind["ServiceAccount"]
    for pod in pods:
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == volumes


@needs_go
def test_the_state_api_is_configured_as_serve_and_the_application_understand_it() -> None:
    from ray.serve.schema import ServeDeploySchema

    (service,) = (d for d in documents(render(*VALUES["service"])) if d["kind"] == "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "spark_bridge.state_http.serve_app:build_app"
    Settings.model_validate(application.args)
    assert [d.name for d in application.deployments] == ["StateApi"]


@needs_go
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("auth: {token: secret}", "auth.secretName: what is the Secret"),
        ('stream: {entrypoint: ""}', "stream.entrypoint: which program"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(values)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        render(tmp_path / "values.yaml")


def test_values_have_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    every = yaml.safe_load((CHART / "values.yaml").read_text())
    assert every.keys() == schema["properties"].keys() - {"global"}
    for path in (CHART / "values.yaml", *CHART.glob("ci/*.yaml"), *MANIFESTS.glob("*.values.yaml")):
        given = yaml.safe_load(path.read_text())
        validator = jsonschema.Draft7Validator(schema)
        validator.validate(given)
        accepted = [field for field, wrong in misspelt(given) if validator.is_valid(wrong)]
        # What is in a list is Kubernetes' own; labels are anybody's.
        assert [field for field in accepted if not re.search(r"\.\d+\.|\.labels\.", field)] == [], path.name


def test_versions_are_those_of_the_project() -> None:
    chart, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert chart["appVersion"] == chart["version"] == version
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert values["rayVersion"] == ray
    dockerfile = (ROOT / "deploy/container/Dockerfile").read_text()
    assert f"FROM rayproject/ray:{ray}-py311" in dockerfile


def strict(schema: Any) -> Any:
    """A CRD's schema that refuses unknown fields, as ``kubectl apply --validate=strict`` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    return made


@needs_go
@pytest.mark.skipif(not CRDS, reason="KUBERAY_CRDS names no directory with KubeRay's CRD files")
@pytest.mark.parametrize("values", VALUES)
def test_the_operator_accepts_the_output_of_the_chart(values: str) -> None:
    crds = [yaml.safe_load(path.read_text()) for path in Path(CRDS).glob("*.yaml")]
    schemas = {
        crd["spec"]["names"]["kind"]: next(v for v in crd["spec"]["versions"] if v["name"] == "v1")["schema"]
        for crd in crds
        if any(v["name"] == "v1" for v in crd["spec"]["versions"])
    }
    for document in documents(render(*VALUES[values])):
        if document["apiVersion"] != "ray.io/v1":
            continue
        schema = strict(schemas[document["kind"]]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        validator = jsonschema.Draft202012Validator(schema)
        validator.validate(document)
        accepted = [f for f, wrong in misspelt(document) if f.startswith("spec.") and validator.is_valid(wrong)]
        assert accepted == [], "misspelt and accepted"
