"""The generated blocks of docs/reference are those of the code, and name everything that users import."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ray_statestore
import spark_bridge
from tests.docs.reference import END, pages, rendered, without_generated
from tests.docs.reference.docstrings import as_markdown


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_blocks_are_those_of_the_code(path: Path) -> None:
    page = path.read_text()
    assert rendered(page) == page, "run `make reference`"


def test_every_public_name_has_a_place() -> None:
    text = "\n".join(path.read_text() for path in pages())
    described = set(re.findall(r"^#+ (\w+)$", text, re.MULTILINE))
    described |= {
        name.rpartition(".")[2] for name in re.findall(r"^<!-- generated: \w+ (\S+) -->$", text, re.MULTILINE)
    }
    assert {name for name in ray_statestore.__all__ if name not in described} == set()


def test_a_changed_docstring_changes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"# Page\n\n## Sessions\n\n<!-- generated: api spark_bridge: stop_spark -->\n{END}\n"
    monkeypatch.setattr(spark_bridge.stop_spark, "__doc__", "End ``all``.")
    assert rendered(page) == (
        "# Page\n\n## Sessions\n\n<!-- generated: api spark_bridge: stop_spark -->\n\n"
        f"### stop_spark\n\n```py\nstop_spark() -> None\n```\n\nEnd `all`.\n\n{END}\n"
    )


def test_lines_that_generate_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match="Unknown generator 'opinions'"):
        rendered(f"# Page\n\n<!-- generated: opinions spark_bridge -->\n{END}\n")
    with pytest.raises(ValueError, match="1 lines begin a generated block, 0 end one"):
        rendered("# Page\n\n<!-- generated: module spark_bridge.functions -->\n")
    with pytest.raises(ValueError, match=r"StateScan has no public methods \['no_method'\]"):
        rendered(f"# Page\n\n<!-- generated: api spark_bridge: StateScan(no_method) -->\n{END}\n")


def test_prose_without_generated_blocks_keeps_its_lines() -> None:
    page = f"# Page\n\n<!-- generated: metrics host -->\n\n| a |\n\n{END}\nLast.\n"
    assert without_generated(page).splitlines()[7] == "Last."
    assert "| a |" not in without_generated(page)


def test_docstrings_as_markdown() -> None:
    docstring = (
        "Take ``*args`` of ``A``s, a < b, **one** * c:\n\n    f(1)\n\n- ``x``: a list\n  of one.\n\n    % run\n\nEnd."
    )
    assert as_markdown(docstring) == (
        "Take `*args` of `A`s, a \\< b, **one** * c:\n\n```py\nf(1)\n```\n\n- `x`: a list\n  of one.\n\n"
        "```text\n% run\n```\n\nEnd."
    )
