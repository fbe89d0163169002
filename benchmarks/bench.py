"""The benchmark suite: runs each comparison of ``comparisons/`` in its own process, and writes ``RESULTS.md``.

    python benchmarks/bench.py                              all of them at full size; hours
    python benchmarks/bench.py throughput --keys 100000     one by name, with its sizes; replaces its part of RESULTS.md
    python benchmarks/bench.py --smoke                      small sizes: equality, and ratios that are now slower
    python benchmarks/bench.py --smoke --keep               the same, and keep the figures for later comparison
    python benchmarks/bench.py --list                       names and sizes
    python benchmarks/bench.py --render                     RESULTS.md again from the kept figures

``make bench`` and ``make bench-smoke`` do the same, with the environments that are needed. A new measurement joins the
kept runs in ``results/<comparison>.json``, and a line for each ratio says whether it is within their range. A smoke run
is compared with ``results/smoke/``, made by another smoke run with ``--keep``, as ratios depend on the sizes. JVMs of a
smoke run do without their second compiler, which does not pay in a short run. A smoke run reports slower ratios; it
ends with status 1 only if a comparison failed, for instance because results were not equal.

Comparisons on Spark 4.2 run with the Python of ``.venv42``, which ``make venv42`` makes if it is missing, or of the
environment that STATESTORE_VENV42 names; those on Spark 4.3 with that of ``make test-matrix``. No RayDP works with
Spark 4.3: there Spark's own cluster runs the executors, and ``attach`` starts the hosts.

``remarks/<comparison>.md`` is written by hand and explains targets that are missed. ``RESULTS.md`` has it below the
figures.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from comparisons import COMPARISONS
from rich.console import Console
from suite import report, runner
from suite.machine import commit
from suite.model import ENVIRONMENTS, Comparison, Kind, Result, Slower, load, repeated, save, slower
from suite.report import WHOLE_RUN, WholeRun

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
console = Console(highlight=False, stderr=True)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Return the suite's own options, and the sizes: all other arguments that begin with two dashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="comparisons (default all)")
    parser.add_argument("--smoke", action="store_true", help="small sizes; compare with kept figures")
    parser.add_argument("--keep", action="store_true", help="keep the figures of a smoke run")
    parser.add_argument("--environment", choices=tuple(ENVIRONMENTS), help="only in this one")
    parser.add_argument("--minutes", type=float, help="how long each may take, instead of its usual limit")
    parser.add_argument("--list", action="store_true", help="names, sizes and limits")
    parser.add_argument("--render", action="store_true", help="only make RESULTS.md again")
    for hidden in ("--child", "--kind", "--sizes", "--answer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    # Sizes are taken out first: argparse would take their values for names.
    own, sizes = list[str](), dict[str, list[str]]()
    known = {option for action in parser._actions for option in action.option_strings}
    values = own
    for word in arguments:
        name, has_value, value = word.partition("=")
        if not word.startswith("--"):
            values.append(word)
        elif name in known:
            own.append(word)
            values = own
        else:
            given = sizes[name.removeprefix("--").replace("-", "_")] = [value] if has_value else []
            values = own if has_value else given
    options = parser.parse_args(own)
    if sizes and len(options.names) != 1:
        parser.error(f"--{', --'.join(sizes)}: sizes are given with the one comparison that they are for.")
    if unknown := [name for name in options.names if name not in COMPARISONS]:
        parser.error(f"Unknown comparison {', '.join(unknown)}; the comparisons are {', '.join(COMPARISONS)}.")
    return options, sizes


def write_results() -> None:
    results = load(RESULTS)
    remarks = {path.stem: path.read_text() for path in sorted((HERE / "remarks").glob("*.md"))}
    (HERE / "RESULTS.md").write_text(report.render(COMPARISONS, results, remarks, WholeRun.load(RESULTS)))
    drawn = report.plots(COMPARISONS, results)
    RESULTS.mkdir(exist_ok=True)
    for name, text in drawn.items():
        (RESULTS / name).write_text(text)
    for name in COMPARISONS:  # the other plots there are of programs that draw for themselves
        for path in (RESULTS / f"{name}{environment}.svg" for environment in ("", *(f"-{e}" for e in ENVIRONMENTS))):
            if path.name not in drawn:
                path.unlink(missing_ok=True)


def show_list() -> None:
    for name, c in COMPARISONS.items():
        where = " and ".join(ENVIRONMENTS[e] for e in c.environments)
        smoke = "" if c.in_smoke else "; not in the smoke run unless it is named"
        print(f"{name}: {c.title}, on {where}; at most {c.minutes['full']:g} minutes{smoke}")
        for size, value in c.sizes["full"].items():
            values = value if isinstance(value, list) else [value]
            print(f"    --{size.replace('_', '-')} {' '.join(map(str, values))}")


def measure(chosen: Sequence[Comparison], kind: Kind, options: argparse.Namespace, given: dict[str, list[str]]) -> int:
    """Run the comparisons, keep the results, and report. Return 1 if one failed."""
    directory = RESULTS if kind == "full" else RESULTS / "smoke"
    kept = load(directory)
    failed, unknown, found = list[str](), list[str](), list[Slower]()
    if options.minutes is not None:
        chosen = [replace(comparison, minutes={kind: options.minutes}) for comparison in chosen]
    for comparison in chosen:
        size = comparison.size(kind, given)
        for environment in comparison.runs_in(kind, options.environment):
            part = runner.run(comparison, environment, kind, size, console)
            if part.failure is not None:
                failed.append(f"{comparison.name} on {ENVIRONMENTS[environment]}: {part.failure}")
            before = kept.get(comparison.name, Result(comparison.name, {}))
            if kind == "smoke":
                if environment not in before.parts:
                    unknown.append(f"{comparison.name} on {ENVIRONMENTS[environment]}")
                suspect = slower(before, Result(comparison.name, {environment: part}))
                if suspect:
                    console.print(f"{len(suspect)} ratios are worse than kept: measuring them again, to rule out noise")
                    again = runner.run(comparison, environment, kind, size, console)
                    if again.failure is not None:
                        failed.append(f"{comparison.name} on {ENVIRONMENTS[environment]}, second run: {again.failure}")
                    second = slower(before, Result(comparison.name, {environment: again}))
                    suspect = [ratio for ratio in second if ratio in suspect]
                found += suspect
            if kind == "full" and part.failure is None:
                for line in repeated(before, part):
                    console.print(f"  {line}", style="yellow" if "outside" in line else None, markup=False)
            if kind == "full" or (options.keep and part.failure is None):
                kept[comparison.name] = before.with_part(part)
                save(directory, kept[comparison.name])
            if kind == "full":
                WholeRun.record_again(RESULTS, [f"{comparison.name} on {ENVIRONMENTS[environment]}"])
                write_results()
    for ratio in found:
        console.print(f"slower: {ratio}", style="yellow", markup=False)
    for line in failed:
        console.print(f"failed: {line}", style="bold red", markup=False)
    if kind == "smoke" and not failed:
        console.print(f"All results were equal; {len(found) or 'no'} ratios have become worse than kept.")
    if unknown:
        console.print(
            f"Nothing is kept to compare with of {', '.join(unknown)}: run this with --keep on a quiet machine."
        )
    return 1 if failed else 0


def measure_all(chosen: Sequence[Comparison], options: argparse.Namespace) -> int:
    """Run all comparisons in one go, at full size and then at smoke size. Return 1 if one failed."""
    (RESULTS / WHOLE_RUN).unlink(missing_ok=True)
    run, began = WholeRun(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}", commit(), 0.0), time.perf_counter()
    status = measure(chosen, "full", options, {})
    run = replace(run, seconds=time.perf_counter() - began)
    run.save(RESULTS)
    write_results()
    console.print(run.sentence(), markup=False)
    console.print("[bold]Measuring again at smoke size[/], for later smoke runs to compare with")
    options.keep = True
    return status | measure([c for c in chosen if c.in_smoke], "smoke", options, {})


def main(arguments: Sequence[str]) -> int:
    options, given = parse(arguments)
    if options.child:
        comparison = COMPARISONS[options.child]
        runner.run_here(comparison, options.environment, options.kind, json.loads(options.sizes), Path(options.answer))
        return 0
    if options.list:
        show_list()
        return 0
    if options.render:
        write_results()
        return 0
    # A termination ends all processes that were started, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kind: Kind = "smoke" if options.smoke else "full"
    chosen = [
        c
        for name, c in COMPARISONS.items()
        if name in options.names or (not options.names and (kind == "full" or c.in_smoke))
    ]
    try:
        for comparison in chosen:
            comparison.size(kind, given)
    except ValueError as error:
        console.print(str(error), style="bold red", markup=False)
        return 2
    if kind == "smoke" or options.names or options.environment is not None:
        return measure(chosen, kind, options, given)
    return measure_all(chosen, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
