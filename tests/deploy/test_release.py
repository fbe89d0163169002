"""``deploy/release.sh``: refusals, each with the remedy, and the tag. The description for the package index, and the
source distribution.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "release.sh"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that can be released as 1.2.3, and a ``python`` that builds and checks nothing."""
    root = tmp_path / "project"
    (root / "deploy").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "deploy")
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text("## [1.2.3] - 2026-11-28\n")
    (root / ".gitignore").write_text("dist/\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Prepare")


def release(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    author = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **author, "PATH": f"{root.parent / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "deploy/release.sh", *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_release_is_built_checked_and_tagged(repository: Path) -> None:
    released = release(repository, "tag", "1.2.3")
    assert released.returncode == 0, released.stderr
    assert (repository.parent / "calls").read_text().splitlines() == [
        "-m build --outdir dist .",
        "-m twine check --strict dist/*",
    ]
    assert git(repository, "tag").split() == ["v1.2.3"]
    assert "git push origin v1.2.3" in released.stdout


def test_release_of_another_version_without_a_date_or_with_changes_is_refused(repository: Path) -> None:
    assert "has version 1.2.3, not 2.0.0" in release(repository, "build", "2.0.0").stderr
    (repository / "CHANGELOG.md").write_text("## [1.2.3] - Unreleased\n")
    remedy = re.search(r"no line '(.+) - YYYY-MM-DD'", release(repository, "build", "1.2.3").stderr)
    assert remedy is not None
    (repository / "CHANGELOG.md").write_text(f"{remedy[1]} - 2026-11-29\n")
    assert "commit them" in release(repository, "build", "1.2.3").stderr
    commit(repository)
    assert release(repository, "build", "1.2.3").returncode == 0
    assert git(repository, "tag") == ""


def test_the_description_for_the_package_index_has_absolute_links_to_files_that_exist() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
    ours = re.compile(
        r"https://(?:raw\.githubusercontent|github)\.com/ray-statestore/ray-statestore/(?:blob/)?main/(.+)"
    )
    paths = [link[1].removesuffix("?sanitize=true") for target in targets if (link := ours.fullmatch(target))]
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path.partition("#")[0]).exists()] == []
    assert "(https://raw.githubusercontent.com/ray-statestore/ray-statestore/main/docs/images/roles.svg" in description


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="This is no git repository: its files are not known.")
def test_the_source_distribution_has_every_file_of_the_repository(tmp_path: Path) -> None:
    """So its tests run from it, as the cell ``install-sdist`` of tests/matrix.py does."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    # From a copy: setuptools also takes what an earlier build of this checkout has recorded.
    for name in files:
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    ran = subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "project", capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert files - names == set()


def test_pre_commit_runs_the_checks_of_make_lint() -> None:
    hooks = re.findall(r"entry: \.venv/bin/(.+?), language", (ROOT / ".pre-commit-config.yaml").read_text())
    lint = re.search(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    # Hooks correct what `make lint` only reports, and get the changed files as arguments.
    corrected = {"ruff check .": "ruff check --fix", "ruff format --check .": "ruff format"}
    checks = [line.removeprefix("\t$(BIN)/") for line in lint[1].splitlines()]
    assert len(checks) == 4 and hooks == [corrected.get(check, check) for check in checks]
