"""What the pages name exists: files, modules and tests of the repository, and links between pages."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, Page, pages

TOP = ("backends", "benchmarks", "coordinator_actor", "deploy", "docs", "examples", "spark_bridge", "tests")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"^(?:{'|'.join(TOP)})(?:/[\w.*<>-]+)*/?(?:::\w+)?$")
_MODULE = re.compile(r"^(?:backends|coordinator_actor|spark_bridge)(?:\.\w+)+$")
_OPTIONS = re.compile(r"^```\{options\} (\S+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_RECORD_OF_THE_PAST = ("CHANGELOG.md", "benchmarks/RESULTS.md")
PAGES = [p for p in pages() if p.name not in _RECORD_OF_THE_PAST]


def prose(page: Page) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^(`{3,})(?!\{).*?^\1$", "", page.path.read_text(), flags=re.MULTILINE | re.DOTALL)


def missing(name: str) -> str | None:
    """Why ``name``, which reads like a path, a test or a module, is none; None if it is there, or no such name."""
    if _PATH.match(name):
        path, _, test = name.partition("::")
        if "<" in path or "*" in path:
            return None
        if not (ROOT / path).exists():
            return "there is no such file"
        if test and not re.search(rf"^(?:async )?def {test}\b", (ROOT / path).read_text(), re.MULTILINE):
            return "the file has no such test"
        return None
    if _MODULE.match(name):
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            place = ROOT.joinpath(*parts[:end])
            if (place.is_dir() or place.with_suffix(".py").is_file()) and end >= len(parts) - 2:
                rest = parts[end:]
                return None if not rest or _defines("/".join(parts[:end]), rest[0]) else f"no {rest[0]} there"
        return "there is no such module"
    return None


def _defines(place: str, name: str) -> bool:
    file = ROOT / f"{place}.py"
    source = (file if file.is_file() else ROOT / place / "__init__.py").read_text()
    return re.search(rf"\b{name}\b", source) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_modules_and_tests_exist(page: Page) -> None:
    text = prose(page)
    names = {*_CODE.findall(text), *_OPTIONS.findall(text)}
    assert {name: why for name in sorted(names) if (why := missing(name)) is not None} == {}


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Page) -> None:
    targets = {
        target for target, _ in _LINK.findall(prose(page)) if "://" not in target and not target.startswith("mailto:")
    }
    assert [t for t in sorted(targets) if not (page.path.parent / t).exists()] == []


def test_what_does_not_exist_is_found() -> None:
    assert missing("backends/formats/changelog.py") is None
    assert missing("backends/format/changelog.py") == "there is no such file"
    assert missing("tests/docs/test_paths.py::test_links_lead_somewhere") is None
    assert missing("tests/docs/test_paths.py::test_nothing") == "the file has no such test"
    assert missing("backends.formats.changelog.ChangelogMeta") is None
    assert missing("backends.formats.changelog.Nothing") == "no Nothing there"
    assert missing("spark_bridge.nowhere.at_all.Nothing") == "there is no such module"
    assert missing("spark_bridge.aggregate") is None
    assert missing("client.get") is None
