"""``RESULTS.md`` says whether one run measured all comparisons, the commit it measured, and how long it took."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bench
import pytest
from suite import machine, report
from suite.report import WholeRun

from tests.benchmarks.measurements import case, comparison, part, result

RUN = WholeRun("2026-01-02 10:00", "0123abcd", 9_000.0)


def test_a_single_run_is_reported_with_its_commit_and_time() -> None:
    kept = {"totals": result(part(case([1], [2])))}
    text = report.render({"totals": comparison()}, kept, None, RUN)
    assert "Made in one go on 2026-01-02 10:00 (UTC), commit 0123abcd, in 2 h 30 min." in text
    assert report.PIECES not in text
    assert report.PIECES in report.render({"totals": comparison()}, kept)


def test_repeated_measurements_are_named_once(tmp_path: Path) -> None:
    WholeRun.record_again(tmp_path, ["totals on Spark 3.5"])
    assert WholeRun.load(tmp_path) is None, "no record, nothing to note"
    RUN.save(tmp_path)
    for _ in range(2):
        WholeRun.record_again(tmp_path, ["totals on Spark 3.5"])
    kept = WholeRun.load(tmp_path)
    assert kept is not None and kept.again == ("totals on Spark 3.5",)
    assert "Measured again since: totals on Spark 3.5;" in kept.sentence()


def test_a_run_that_is_broken_off_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RUN.save(tmp_path)

    def broken_off(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "measure", broken_off)
    with pytest.raises(KeyboardInterrupt):
        bench.main([])
    assert WholeRun.load(tmp_path) is None


def test_a_whole_run_is_recorded_with_the_commit_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "measure", lambda chosen, kind, *_: kinds.append(kind) or 0)
    monkeypatch.setattr(bench, "write_results", lambda: None)
    commits = iter(["0123abcd", "later"])
    monkeypatch.setattr(bench, "commit", lambda: next(commits))
    assert bench.main([]) == 0
    kept = WholeRun.load(tmp_path)
    assert kept is not None and kept.commit == "0123abcd" and kinds == ["full", "smoke"]


def test_a_commit_is_said_to_be_changed_unless_only_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "benchmarks" / "suite"
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    suite.mkdir()
    monkeypatch.setattr(machine, "__file__", str(suite / "machine.py"))

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True
        )

    git("init", "-q")
    (suite / "machine.py").write_text("")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    first = machine.commit()
    assert len(first) == 8
    (tmp_path / "benchmarks" / "results" / "totals.json").write_text("{}")
    assert machine.commit() == first
    (suite / "machine.py").write_text("changed")
    assert machine.commit() == f"{first}, changed"
