"""KubeRay's kinds, and the Prometheus operator's, with the fields that the chart uses: another field is an error.

Pod templates are Kubernetes' own kind ``PodTemplate``, and checked as such.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Refuse unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    labels: dict[str, str] = {}


class PodTemplate(Strict):
    metadata: dict[str, Any]
    spec: dict[str, Any]


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class Auth(Strict):
    mode: Literal["disabled", "token"]
    secretName: str | None = None


class SecretKey(Strict):
    name: str
    key: str


class ValueFrom(Strict):
    secretKeyRef: SecretKey


class Value(Strict):
    valueFrom: ValueFrom


class GcsFaultTolerance(Strict):
    redisAddress: str
    redisPassword: Value | None = None


class Autoscaler(Strict):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: int


class ClusterSpec(Strict):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]
    authOptions: Auth | None = None
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: Autoscaler | None = None


class RayResource(Strict):
    apiVersion: Literal["ray.io/v1"]
    metadata: Metadata


class RayCluster(RayResource):
    kind: Literal["RayCluster"]
    spec: ClusterSpec


class JobSpec(Strict):
    entrypoint: str
    backoffLimit: int
    shutdownAfterJobFinishes: bool
    rayClusterSpec: ClusterSpec


class RayJob(RayResource):
    kind: Literal["RayJob"]
    spec: JobSpec


class UpgradeStrategy(Strict):
    type: Literal["None", "NewCluster", "NewClusterWithIncrementalUpgrade"]


class ServiceSpec(Strict):
    upgradeStrategy: UpgradeStrategy
    serveConfigV2: str
    rayClusterConfig: ClusterSpec


class RayService(RayResource):
    kind: Literal["RayService"]
    spec: ServiceSpec


class Selector(Strict):
    matchLabels: dict[str, str]


class Endpoint(Strict):
    port: str
    interval: str


class PodMonitorSpec(Strict):
    selector: Selector
    podMetricsEndpoints: list[Endpoint] = Field(min_length=1)


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class AlertRule(Strict):
    alert: str
    expr: str
    for_: str = Field("0s", alias="for")
    labels: dict[str, str]
    annotations: dict[str, str]


class RuleGroup(Strict):
    name: str
    rules: list[AlertRule]


class PrometheusRuleSpec(Strict):
    groups: list[RuleGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: PrometheusRuleSpec


MODELS: dict[str, type[BaseModel]] = {
    m.__name__: m for m in (RayCluster, RayJob, RayService, PodMonitor, PrometheusRule)
}
