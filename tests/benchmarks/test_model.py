"""Results go to JSON and back, and a part replaces only its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from suite.model import Case, from_json, load, save, to_json

from tests.benchmarks.measurements import case, failed, part, result


def test_a_result_comes_back_from_its_json() -> None:
    kept = result(part(case([1.0, 2.0], [3.0, 4.0]), replace(case([1], [2], "x"), x=10.0)), failed("why", "venv42"))
    assert from_json(to_json(kept)) == kept


def test_figures_are_on_one_line_with_five_digits() -> None:
    turns = {"ours": [[1.234567891, 2.0], [3.0]]}
    text = to_json(result(part(Case("c", "s", turns))))
    assert "[1.2346, 2.0]" in text and "[3.0]" in text
    assert '"All were equal."' in text


def test_numbers_of_numpy_are_numbers() -> None:
    text = to_json(result(part(Case("c", "s", {"ours": [[np.float64(1.5)]]}, x=float(np.int64(3))))))
    assert from_json(text).parts["venv"].cases[0].turns == {"ours": [[1.5]]}


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 99, not 1; measure them again"):
        from_json('{"format": 99}')


def test_the_kept_results_can_be_read() -> None:
    kept = load(Path(__file__).parents[2] / "benchmarks/results")
    assert "queries" in kept and "locality" not in kept, "other programs keep their figures there"


def test_a_part_is_the_newest_of_its_environment_only(tmp_path: Path) -> None:
    first = result(part(case([1], [2])), part(case([3], [4]), environment="venv42"))
    second = first.with_part(failed("it broke"))
    save(tmp_path, second)
    save(tmp_path, result(part(case([5], [6])), name="other"))
    kept = load(tmp_path)
    assert kept["totals"].parts["venv"].failure == "it broke"
    assert kept["totals"].parts["venv42"] == first.parts["venv42"]
    assert kept["totals"].earlier["venv"] == (first.parts["venv"],)
    assert set(kept) == {"totals", "other"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["other.json", "totals.json"]


def test_a_turn_counts_by_its_median() -> None:
    assert Case("c", "s", {"ours": [[1.0, 9.0, 2.0], [4.0]]}).figures("ours") == [2.0, 4.0]
