"""Made-up measurements for the tests of ratios and reports."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from suite.model import Case, Comparison, Contestant, Measured, Part, Result, Size, Target
from suite.runner import Steps

SVG = "{http://www.w3.org/2000/svg}"
CONTESTANTS = {
    "native": Contestant("Spark's own", {"provider": "RocksDB", "changelog": "true"}),
    "ours": Contestant("aggregate", {}, is_ours=True),
}


def case(ours: list[float], native: list[float], name: str = "longs", more_is_better: bool = False) -> Case:
    turns = {"native": [[v] for v in native], "ours": [[v] for v in ours]}
    return Case(name, "keys/s" if more_is_better else "s", turns, more_is_better)


def part(*cases: Case, environment: str = "venv") -> Part:
    return Part(
        environment,
        "full",
        {"keys": 100_000, "work": ["a", "b"]},
        "2026-01-02",
        12.34,
        {"Python": "3.11.7", "Spark": "3.5.7"},
        {"cores": "2, a processor", "memory": "24 GiB", "load": "0.4"},
        CONTESTANTS,
        cases,
        ("All were equal.",),
    )


def failed(reason: str, environment: str = "venv") -> Part:
    return replace(part(environment=environment), contestants={}, notes=(), failure=reason)


def result(*parts: Part, name: str = "totals") -> Result:
    return Result(name, {p.environment: p for p in parts})


def run(size: Size, steps: Steps) -> Measured:
    raise NotImplementedError


def comparison(name: str = "totals", *targets: Target, picture: str = "bars") -> Comparison:
    return Comparison(
        name=name,
        title="Running totals",
        about="A sum.",
        run=run,
        sizes={"full": {"keys": 10_000, "work": ["a", "b"]}, "smoke": {"keys": 100, "work": ["a"]}},
        minutes={"full": 1, "smoke": 1},
        environments=("venv", "venv42"),
        targets=targets,
        picture=picture,  # type: ignore[arg-type]
        x_label="keys",
    )


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(picture).iter(f"{SVG}text")]
