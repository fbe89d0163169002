"""``RESULTS.md`` and its plots are made of the kept results alone."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from suite import report
from suite.model import Result, Slower, Spread, Target, amount

from tests.benchmarks.measurements import CONTESTANTS, SVG, case, comparison, failed, part, result, texts

FASTER = Target("twice as fast", "longs", "ours", 2, against="native", at_least=True)


def rendered(*results: Result, targets: tuple[Target, ...] = (FASTER,)) -> str:
    return report.render({"totals": comparison("totals", *targets)}, {r.comparison: r for r in results})


def test_medians_ratios_settings_and_circumstances_are_shown() -> None:
    memory = {"hosts": 1047.3, "coordinator": 284.0}
    text = rendered(result(replace(part(case([1.0, 1.0, 2.0], [3.0, 4.0, 5.0])), memory=memory)))
    assert "every five seconds, with 100,000 keys: coordinator 284, hosts 1,047." in text
    assert "| longs | native | 4 s | 3 to 5 | 3 |  |" in text
    assert "|  | **ours** | 1 s | 1 to 2 | 3 | 3 (2.5 to 4) |" in text
    assert "`provider=RocksDB`, `changelog=true`" in text and "| ours | aggregate | defaults |" in text
    assert "Size: keys 100,000, work a b." in text
    assert "Versions: Python 3.11.7, Spark 3.5.7." in text
    assert "2, a processor; 24 GiB; load 0.4 at the start" in text
    assert "- All were equal." in text
    assert '`make bench ARGS="totals --environment venv --keys 100000"`' in text, "so are sizes other than usual"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (2.0, "| at least 2 times | 2 (2 to 2) times | reached |"),
        (4.0, "| 1 (1 to 1) times | **not reached**: 2 times away |"),
    ],
)
def test_a_target_is_reached_or_not_and_by_how_much(ours: float, verdict: str) -> None:
    assert verdict in rendered(result(part(case([ours], [4.0]))))


def test_a_difference_is_missed_by_an_amount() -> None:
    target = Target("small", "longs", "ours", 60, kind="difference", against="native", unit="ms")
    text = rendered(result(part(case([190.0], [100.0]))), targets=(target,))
    assert "| at most 60 ms | 90 (90 to 90) ms | **not reached**: by 30 ms |" in text


def test_a_failed_part_has_its_reason_and_the_others_stay() -> None:
    text = rendered(result(failed("KeyError: a|b"), part(case([1], [2]), environment="venv42")))
    assert "**Failed** on 2026-01-02 after 12 s: KeyError: a\\|b" in text
    assert "### totals on Spark 3.5" in text and "### totals on Spark 4.2" in text
    assert "| longs | native | 2 s |" in text
    assert "| not measured | - |" in text


def test_all_kept_runs_are_shown_by_machine() -> None:
    other = replace(part(case([1], [2])), machine={"cores": "2, another", "memory": "8 GiB", "load": "0"})
    text = rendered(result(part(case([1.0], [4.0]))).with_part(part(case([1.0], [5.0]))).with_part(other))
    assert "| worst median (range of all turns) | 2, another, 8 GiB: 1 run | 2, a processor, 24 GiB: 2 runs |" in text
    assert "| longs | ours / native | 2 (2 to 5) | 2 | 4 to 5 |" in text
    assert "| 2 (2 to 5) times, 3 runs | reached |" in text


def test_missing_parts_are_reported() -> None:
    assert "Not measured yet." in rendered()


def test_ratios_of_a_contestant_that_a_case_lacks_stay_empty() -> None:
    alone = replace(case([1], [2], "alone"), turns={"ours": [[1.0]]})
    assert "| alone | **ours** | 1 s | 1 to 1 | 1 |  |" in rendered(result(part(case([1], [2]), alone)))


def test_remarks_are_below_their_comparison() -> None:
    known, kept = {"totals": comparison()}, {"totals": result(part(case([1], [2])))}
    text = report.render(known, kept, {"totals": "The shuffle is the limit.\n", "gone": "Of old."})
    assert text.endswith("### Remarks\n\nThe shuffle is the limit.\n") and "Of old" not in text


def test_the_same_results_give_the_same_text_and_plots() -> None:
    kept = {"totals": result(part(case([1.0, 1.0, 2.0], [3.0, 4.0, 5.0])))}
    known = {"totals": comparison()}
    assert report.render(known, kept) == report.render(known, kept)
    assert report.plots(known, kept) == report.plots(known, kept)


def test_a_slower_ratio_is_reported_in_a_sentence() -> None:
    said = str(Slower("totals", "venv", "longs", "ours", "native", Spread(4, 3, 5), Spread(2, 1, 2)))
    assert (
        said == "totals on Spark 3.5, longs: ours was 4 (3 to 5) times as fast as native, and is 2 (1 to 2): "
        "2.0 times slower than kept."
    )


# -- plots ---------------------------------------------------------------------------------------


def widths(picture: str) -> list[float]:
    """The widths of the bars, from the left ends to the right ends of their paths."""
    bars = [node for node in ET.fromstring(picture).iter(f"{SVG}path") if "clip-path" in node.attrib]
    numbers = [
        [float(x) for x in re.findall(r"[-\d.]+", node.get("d", ""))[::2]]
        for node in bars
        if "fill:" in node.get("style", "") and "fill: none" not in node.get("style", "")
    ]
    return [max(xs) - min(xs) for xs in numbers]


def test_every_part_that_has_figures_has_a_plot() -> None:
    kept = {"totals": result(part(case([1], [2])), failed("x", "venv42"))}
    drawn = report.plots({"totals": comparison()}, kept)
    assert list(drawn) == ["totals-venv.svg"]
    assert "![Running totals](results/totals-venv.svg)" in report.render({"totals": comparison()}, kept)


def test_bars_have_the_length_of_their_figures() -> None:
    picture = report.bars("title & more", [case([2.0], [4.0], "a <b>")], CONTESTANTS)
    native, ours = widths(picture)
    assert native == pytest.approx(2 * ours, rel=0.01)
    assert {"title & more", "native", "ours", "4", "2"} <= set(texts(picture))


def test_very_different_bars_are_on_a_logarithmic_scale() -> None:
    cases = [case([1.0], [10.0], "short"), case([1000.0], [100.0], "long")]
    assert "logarithmic scale" not in " ".join(texts(report.bars("t", cases[:1], CONTESTANTS)))
    picture = report.bars("t", cases, CONTESTANTS)
    ten, one, hundred, thousand = widths(picture)
    assert "logarithmic scale" in " ".join(texts(picture)) and {"short", "long"} <= {t.strip() for t in texts(picture)}
    assert thousand - one == pytest.approx(3 * (ten - one), rel=0.01) and hundred > ten


def test_lines_go_along_x() -> None:
    cases = [replace(case([v], [2 * v], f"{x}"), x=x) for x, v in ((1e5, 1.0), (1e6, 1.1), (1e7, 1.3))]
    kept = {"totals": result(part(*cases))}
    (picture,) = report.plots({"totals": comparison(picture="lines")}, kept).values()
    assert {"100,000", "1,000,000", "10,000,000", "keys", "ours", "native"} <= set(texts(picture))
    assert report.plots({"totals": comparison(picture="lines")}, {"totals": result(part(*cases[:1]))}) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (12.34, "12.3"), (123456.7, "123,457"), (-2.5, "-2.5"), (100, "100")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert amount(value) == text
