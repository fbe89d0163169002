"""The alerts that are made quick for tests are the project's own but for their durations and three limits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.spark_bridge.alerts.scaled_rules import FACTORS, LIMITS, scaled

RULES = Path(__file__).parents[3] / "deploy/prometheus/statestore.rules.yml"
PROJECTS: dict[str, Any] = yaml.safe_load(RULES.read_text())


def by_name(rules: dict[str, Any]) -> dict[str, Any]:
    return {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}


def test_every_duration_is_divided_and_none_is_below_a_second() -> None:
    quick = by_name(scaled(PROJECTS))
    assert quick["StatestoreCheckpointLate"]["for"] == "3000ms"
    assert quick["StatestoreStateGrows"]["for"] == "1000ms"
    assert "rate(ray_statestore_storage_failures_total[15000ms])" in quick["StatestoreStorage"]["expr"]
    assert "[90000ms:3000ms]" in quick["StatestoreRestartLoop"]["expr"]
    assert "[180000ms] offset 30000ms)" in quick["StatestoreTasksRetried"]["expr"]
    assert "offset 60000ms" in quick["StatestoreStateGrows"]["expr"]
    assert [d for rule in quick.values() for d in re.findall(r"\b\d+[smhd]\b", rule["expr"])] == []


def test_nothing_else_changes() -> None:
    projects, same = by_name(PROJECTS), by_name(scaled(PROJECTS, factor=1))
    assert FACTORS.keys() | LIMITS.keys() <= projects.keys() == same.keys()
    for name, rule in same.items():
        usual, lowered = LIMITS.get(name, ("", ""))
        expression = rule["expr"].replace(lowered, usual) if usual else rule["expr"]
        for quick, slow in {
            "86400000ms": "1d",
            "3600000ms": "1h",
            "900000ms:30000ms": "15m:30s",
            "600000ms": "10m",
            "300000ms": "5m",
        }.items():
            expression = expression.replace(quick, slow)
        assert expression == projects[name]["expr"]
        assert {**rule, "expr": "", "for": ""} == {**projects[name], "expr": "", "for": ""}


def test_changed_limit_is_reported() -> None:
    other = yaml.safe_load(RULES.read_text().replace("> 1e8", "> 1e9"))
    with pytest.raises(ValueError, match=r"StatestoreStateGrows.*change LIMITS"):
        scaled(other)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="There is no promtool: install Debian's prometheus.")
def test_promtool_takes_them(tmp_path: Path) -> None:
    quick = tmp_path / "quick.yml"
    quick.write_text(yaml.safe_dump(scaled(PROJECTS)))
    done = subprocess.run(["promtool", "check", "rules", str(quick)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
