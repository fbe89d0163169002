"""The rules for Prometheus: promtool takes them, each fault raises its alert alone, and they use metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from coordinator_actor.metrics import HISTOGRAM, METRICS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/statestore.rules.yml"
CASES = [Path(__file__).parent / name for name in ("prometheus_rules_test.yml", "prometheus_growth_test.yml")]
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: install Debian's package prometheus."
)


@needs_promtool
@pytest.mark.parametrize(
    "asked", [["check", "rules", str(RULES)], ["test", "rules", *map(str, CASES)]], ids=["check", "test"]
)
def test_promtool_takes_them(asked: list[str]) -> None:
    done = subprocess.run(["promtool", *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def exported(text: str) -> set[str]:
    """The metrics that a query names."""
    return set(re.findall(r"\bray_statestore_\w+", text))


KNOWN = {m.exported for m in METRICS.values()} | {
    f"{m.exported}_{series}" for m in METRICS.values() if m.kind == HISTOGRAM for series in ("bucket", "sum", "count")
}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_that_exist_and_says_what_to_do(rule: dict[str, object]) -> None:
    said = rule["annotations"]
    assert isinstance(said, dict)
    assert exported(str(rule["expr"])) and exported(str(rule["expr"])) <= KNOWN
    assert exported(str(said["description"])) <= KNOWN
    page, _, section = str(said["runbook"]).partition("#")
    headings = {line[3:].strip().lower() for line in (ROOT / page).read_text().splitlines() if line.startswith("## ")}
    assert section in headings


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_case(rule: dict[str, object]) -> None:
    assert f'alertname="{rule["alert"]}"' in "".join(cases.read_text() for cases in CASES)
