"""The pages name only existing files, modules, tests, commands, options and links."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from spark_bridge.cli.main import app
from tests.docs.pages import ROOT, SHELL, Page, commands, pages

TOP = (
    "backends",
    "benchmarks",
    "coordinator_actor",
    "deploy",
    "docs",
    "examples",
    "ray_statestore",
    "spark_bridge",
    "tests",
)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"^(?:{'|'.join(TOP)})(?:/[\w.*<>-]+)*/?(?:::\w+)?$")
_MODULE = re.compile(r"^(?:backends|coordinator_actor|spark_bridge)(?:\.\w+)+$")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_COMMAND = re.compile(r"^statestore\b[^|]*")
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


def not_in_the_program(words: list[str]) -> str | None:
    """Which of the words of a ``statestore`` line is neither a command of the program nor an option of the command;
    None if all are. Arguments, values of options and what stands after ``--`` are not looked at.
    """
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        if word == "--":
            break
        if word.startswith("-"):
            names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            if word.split("=")[0] not in {*names, "--help"}:
                return f"no option {word}"
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"no command {word}"
            command = command.commands[word]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page: Page) -> None:
    inline = [found[0].split() for name in _CODE.findall(prose(page)) if (found := _COMMAND.match(name))]
    shown = [words for block in page.blocks() if block.language == SHELL for words in commands(block, "statestore")]
    assert {" ".join(words): why for words in inline + shown if (why := not_in_the_program(words)) is not None} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_modules_and_tests_exist(page: Page) -> None:
    text = prose(page)
    names = set(_CODE.findall(text))
    assert {name: why for name in sorted(names) if (why := missing(name)) is not None} == {}


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Page) -> None:
    targets = {
        target for target, _ in _LINK.findall(prose(page)) if "://" not in target and not target.startswith("mailto:")
    }
    assert [t for t in sorted(targets) if not (page.path.parent / t).exists()] == []


def test_missing_names_are_found() -> None:
    assert missing("backends/formats/changelog.py") is None
    assert missing("backends/format/changelog.py") == "there is no such file"
    assert missing("tests/docs/test_paths.py::test_links_lead_somewhere") is None
    assert missing("tests/docs/test_paths.py::test_nothing") == "the file has no such test"
    assert missing("backends.formats.changelog.ChangelogMeta") is None
    assert missing("backends.formats.changelog.Nothing") == "no Nothing there"
    assert missing("spark_bridge.nowhere.at_all.Nothing") == "there is no such module"
    assert missing("spark_bridge.aggregate") is None
    assert missing("client.get") is None
    assert not_in_the_program(["statestore", "savepoint", "list", "PATH"]) is None
    assert not_in_the_program(["statestore", "status", "--json"]) is None
    assert not_in_the_program(["statestore", "run", "my_stream.py", "--", "--input", "x"]) is None
    assert not_in_the_program(["statestore", "savepoint", "trigger", "--stop"]) == "no command trigger"
    assert not_in_the_program(["statestore", "status", "--jsonl"]) == "no option --jsonl"
