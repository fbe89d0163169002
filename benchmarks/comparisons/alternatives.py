"""Updates a second and core of stateful Python: ours, Spark's own, Flink, Bytewax and Pathway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alternatives.contestants import ALTERNATIVES, HEADING, UNITS, Alternative, python_of, rows, version_of
from suite.machine import directory
from suite.model import Case, Comparison, Contestant, Measured, Size, Table
from suite.runner import Steps

if TYPE_CHECKING:
    from alternatives.turns import Course


def chosen(names: list[str]) -> list[Alternative]:
    """Return contestants by name. Raises ``ValueError`` for an unknown one."""
    if unknown := [name for name in names if name not in ALTERNATIVES]:
        raise ValueError(f"Unknown contestant {', '.join(unknown)}; the contestants are {', '.join(ALTERNATIVES)}.")
    return [ALTERNATIVES[name] for name in names]


def run(size: Size, steps: Steps) -> Measured:
    """Give all contestants the same rows, in turns; compare the whole state of each, then give the figures."""
    from alternatives import turns

    wanted = chosen(size["contestants"])
    sizes = turns.Sizes(size["turns"], size["events"], size["checkpoint_seconds"], size["share"])
    steps.expect(len(wanted) * (sizes.turns + 1))
    pythons, versions, left_out = _environments(wanted, steps)
    with directory() as root:
        steps.now("making the input")
        slices = max(turns.slices_of(a.pace, sizes.share)[0] for a in wanted) * sizes.turns
        made = turns.make(root / "given", size["rows"] // turns.SLICES, size["keys"], slices)
        runner = turns.Courses(root, pythons, made, sizes, steps, left_out)
        courses = runner.run([a for a in wanted if a.name not in left_out])
    described = {(a := c.alternative).name: _described(a, versions[a.group.environment]) for c in courses}
    notes = [
        "The whole state of each was compared at the end: counts and sums of all users were equal to what numpy "
        f"computes of the same rows. Each was started {sizes.turns + 1} times, from its own state.",
        "An update is a row that is counted. Per core: of a second of CPU time of all processes of the contestant, "
        "which are bound to two cores.",
        *(f"`{name}` is left out: {why}" for name, why in left_out.items()),
    ]
    return Measured(described, _cases(courses), notes)


def _environments(wanted: list[Alternative], steps: Steps) -> tuple[dict[str, Path], dict[str, str], dict[str, str]]:
    """Return Pythons and versions by environment, and by contestant why one that has none is left out."""
    pythons, versions, left_out = dict[str, Path](), dict[str, str](), dict[str, str]()
    for group in dict.fromkeys(a.group for a in wanted):
        steps.now(f"making the environment of {group.name}")
        try:
            pythons[group.environment] = python_of(group.environment)
            versions[group.environment] = version_of(group.package, pythons[group.environment])
        except RuntimeError as error:
            steps.say(f"{group.name} is left out: {error}")
            left_out |= {a.name: str(error) for a in wanted if a.group == group}
    return pythons, versions, left_out


def _described(alternative: Alternative, version: str) -> Contestant:
    settings = {alternative.group.package: version, **alternative.settings, alternative.durable: ""}
    return Contestant(alternative.label, settings, alternative.is_ours)


def _cases(courses: list[Course]) -> list[Case]:
    cases = []
    for (case, unit), figure in zip(UNITS.items(), ("per_core", "per_second", "to_result", "to_query"), strict=True):
        turns = {c.alternative.name: [[v] for v in values] for c in courses if (values := getattr(c, figure))}
        if turns:
            cases.append(Case(case, unit, turns, more_is_better=unit != "ms"))
    return cases


COMPARISONS = (
    Comparison(
        name="alternatives",
        title="What people would pick instead",
        about="A running count and sum by user, durable and restarted from its state between turns: this project, "
        "PySpark's own ways, PyFlink, Bytewax and Pathway, each set up as its documentation says. "
        "`docs/explanation/alternatives.md` says how.",
        run=run,
        sizes={
            "full": dict(contestants=list(ALTERNATIVES), rows=500_000, keys=20_000, turns=2, events=5)
            | dict(checkpoint_seconds=1.0, share=1.0),
            "smoke": dict(contestants=["aggregate-3.5", "spark-native-3.5", "bytewax"], rows=40_000, keys=4_000)
            | dict(turns=2, events=2, checkpoint_seconds=1.0, share=0.25),
        },
        minutes={"full": 60, "smoke": 6},
        in_smoke=False,
        table=Table(HEADING, rows),
    ),
)
