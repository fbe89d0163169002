"""Pages keep to 120 columns, except tables, code, generated blocks and unbreakable links.

Prose avoids phrases that are hard to read.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, pages
from tests.docs.reference import without_generated

WIDTH = 120
OTHERS = ("benchmarks/RESULTS.md",)


def too_long(page: Page) -> list[int]:
    """The numbers of lines of prose that are longer than ``WIDTH``."""
    found, fence = [], ""
    for number, line in enumerate(without_generated(page.path.read_text()).splitlines(), start=1):
        mark = line.lstrip()[:3]
        if mark in ("```", ":::"):
            fence = "" if fence == mark else fence or mark
        elif (
            not fence
            and len(line) > WIDTH
            and not line.startswith(("|", "<!--", "![", "    "))
            and " " in line.strip(" -")
        ):
            found.append(number)
    return found


@pytest.mark.parametrize("page", [p for p in pages() if p.name not in OTHERS], ids=lambda p: p.name)
def test_120_columns(page: Page) -> None:
    assert too_long(page) == []


HARD_PHRASES = (
    r"\b(take|takes|took|taking) note\b|\bnoted\b",
    r"\b(anew|meanwhile|whoever|nobody|somebody|besides?)\b",
    r"\b(go|goes|going|gone|went) on\b",
    r"\b(is|are|was|were) no (?!longer|more|\d)[a-z]+",
    r"\b(is|are|was|were|be|been) told\b|\b(hears?|heard) of\b|\bbelieves?\b",
    r"(?:^|[.;:,(] ?|\b(?:of|by|with|from|for|to|and|or|as|than|on|in|at) )"
    r"what (?:is|are|was|were|has|have|had|it|they)\b",
    r"\b(of|by|from|for|in|on|at|with|to) which\b",
    r"\b(in vain|for good|at hand|once more|be it|as it comes|no more than|in so far)\b",
    r"\b(come|comes|came|coming) again\b|\bof (its|their) own\b|\bso (much|many) (as|for)\b",
    r"\b(stands?|stood|lies?|lay) (in|there|beside|behind|under|below|above|elsewhere|between)\b",
    r"\b(a text|texts|the text of)\b",
)
"""Patterns of German grammar in English words. A sentence without them can still be hard to read: read it aloud."""
HARD_PHRASE = re.compile("|".join(HARD_PHRASES), re.IGNORECASE)
PRODUCT = ("backends", "coordinator_actor", "ray_statestore", "spark_bridge", "pyspark_ray_statestore")
STRINGS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and content of the lines of prose: comments and strings of a program, a page without its code and
    generated blocks.
    """
    if path.suffix == ".py":
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type in STRINGS:
                    yield from enumerate(token.string.splitlines(), start=token.start[0])
        return
    is_code = False
    for number, line in enumerate(without_generated(path.read_text()).splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def hard_phrases(paths: list[Path]) -> tuple[list[str], float]:
    """Return the places of hard phrases, and their number for each 1,000 words."""
    places, num_words = [], 0
    for path in paths:
        for number, line in prose(path):
            num_words += len(re.findall(r"[A-Za-z']+", line))
            places += [f"{path.relative_to(ROOT)}:{number}: {m[0]}" for m in HARD_PHRASE.finditer(line)]
    return places, 1000 * len(places) / num_words


def test_what_is_a_hard_phrase(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody is told of it meanwhile.\n\n```text\nanew\n```\nThe host loads the partition again.\n")
    program = tmp_path / "program.py"
    program.write_text('anew = 1  # made anew\nerror = "this is no key"\n')
    found = [(n, m[0]) for path in (page, program) for n, line in prose(path) for m in HARD_PHRASE.finditer(line)]
    assert found == [(1, "Nobody"), (1, "is told"), (1, "meanwhile"), (1, "anew"), (2, "is no key")]


@pytest.mark.parametrize(("what", "most"), [("product", 1.5), ("pages", 1.5), ("tests", 2.5)])
def test_prose_has_few_hard_phrases(what: str, most: float) -> None:
    if what == "pages":
        paths = [page.path for page in pages() if page.name not in OTHERS]
    else:
        roots = PRODUCT if what == "product" else ("tests",)
        paths = [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]
    places, rate = hard_phrases(paths)
    assert rate <= most, "Rewrite some of these sentences:\n" + "\n".join(places)
