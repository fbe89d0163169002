"""Pages keep to 120 columns, but for tables, code and links that cannot be broken."""

from __future__ import annotations

import pytest

from tests.docs.pages import Page, pages

WIDTH = 120
OTHERS = ("benchmarks/RESULTS.md",)


def too_long(page: Page) -> list[int]:
    """The numbers of lines of prose that are longer than ``WIDTH``."""
    found, fence = [], ""
    for number, line in enumerate(page.path.read_text().splitlines(), start=1):
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
