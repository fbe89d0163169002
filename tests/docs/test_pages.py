"""The code of the pages that needs no cluster, and the marks of all code. What needs Spark is in
tests/spark_bridge/test_pages.py.
"""

from __future__ import annotations

import codeop
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, RUN, SHELL, Page, pages, run, unknown_commands

LOCAL = [p for p in pages() if p.run_blocks() and not p.needs_spark]


@pytest.mark.parametrize("page", LOCAL, ids=lambda p: p.name)
def test_runs(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_every_command_is_checked_or_says_why_not(page: Page) -> None:
    for block in page.blocks():
        if block.language == SHELL and block.shown_only is None:
            assert unknown_commands(block) == [], (
                f"{page.name}:{block.line}: run these lines, or mark the block shown only"
            )


def refused_at_the_prompt(code: str) -> str | None:
    """Return what Python's interactive prompt says of ``code``, which a reader pastes and ends with an empty line;
    None if the prompt takes all of it, or if the first line names the file that the code is saved in. Up to Python 3.12
    the prompt takes pasted code line by line.
    """
    if re.match(r"# \w+\.py\n", code):
        return None
    waiting: list[str] = []
    for number, line in enumerate([*code.splitlines(), ""], start=1):
        waiting.append(line)
        try:
            done = codeop.compile_command("\n".join(waiting), symbol="single")
        except SyntaxError as error:
            return f"line {number}: {error.msg}"
        waiting = waiting if done is None else []
    return f"not complete: {waiting[0]}" if waiting else None


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_code_can_be_pasted_at_the_prompt(page: Page) -> None:
    shown = [block for block in page.blocks() if block.language == RUN and not block.is_hidden]
    assert {block.line: why for block in shown if (why := refused_at_the_prompt(block.code)) is not None} == {}


def test_code_that_the_prompt_accepts() -> None:
    assert refused_at_the_prompt("with x:\n    y()\n\nprint(1)\nfor a in b:\n    print(a)") is None
    assert refused_at_the_prompt("with x:\n    y()\nprint(1)") == "line 3: invalid syntax"
    assert refused_at_the_prompt("class A:\n    x = 1\n\n    y = 2") == "line 4: unexpected indent"
    assert refused_at_the_prompt("# a.py\nclass A:\n    x = 1\n\n    y = 2") is None
    assert refused_at_the_prompt("f(1,") == "not complete: f(1,"


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_languages_are_those_that_the_runner_knows(page: Page) -> None:
    known = {"python", "py", "sh", "text", "json", "yaml", "toml", "sql", ""}
    for block in page.blocks():
        is_directive = block.language.startswith("{")
        assert block.language in known or is_directive, f"{page.name}:{block.line}: {block.language}"


def test_every_page_of_the_site_is_in_a_list_of_contents() -> None:
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    for page in docs.rglob("*.md"):
        for entries in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            names = [entry for entry in entries.split() if not entry.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert sorted(p for p in docs.rglob("*.md") if "_build" not in p.parts and p not in listed) == []


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_a_page_that_includes_another_says_so_to_readers_on_github(page: Page) -> None:
    text = page.path.read_text()
    assert bool(re.search(r"^> On GitHub ", text, re.MULTILINE)) == bool(
        re.search(r"^```\{include\}", text, re.MULTILINE)
    )


def test_a_failing_block_names_the_line_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "# Page\n\n```python\nx = 1\n```\n<!-- check\nassert x == 1\nassert x == 2\n-->\n"
    )
    with pytest.raises(AssertionError) as caught:
        run(Page("page.md"))
    assert caught.traceback[-1].lineno == 7  # counted from 0: the second line of the check


def test_a_mark_without_a_block_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("<!-- shown only: because -->\n\nProse.\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ValueError, match="right before a block"):
        Page("page.md").blocks()
