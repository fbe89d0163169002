"""The generated blocks of the pages in docs/reference: ``make reference`` writes them from the code.

A block has its generator and the arguments in its first line. Everything down to the last line is generated:

    <!-- generated: options backends.StateStoreConf -->

    ...

    <!-- end of generated -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from coordinator_actor.metrics import METRICS
from tests.docs.pages import ROOT
from tests.docs.reference import api, command_line, options

END = "<!-- end of generated -->"
_BEGIN = re.compile(r"^<!-- generated: (?P<generator>\w+) (?P<arguments>[^>]+?) -->$", re.MULTILINE)
_BLOCK = re.compile(rf"({_BEGIN.pattern})\n.*?^{END}$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_FENCED = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that have generated blocks, in alphabetical order."""
    paths = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [path for path in paths if _BEGIN.search(path.read_text())]


def rendered(page: str) -> str:
    """Return a page with its blocks generated again. Raises ``ValueError`` for a block without an end, and for a
    generator that does not exist.
    """
    num_begins, num_blocks = len(_BEGIN.findall(page)), len(_BLOCK.findall(page))
    if num_begins != num_blocks or num_begins != page.count(END):
        raise ValueError(
            f"{num_begins} lines begin a generated block, {page.count(END)} end one, and {num_blocks} pairs match: "
            f"end each block with {END}"
        )
    return _BLOCK.sub(lambda block: _block(page, block), page)


def without_generated(page: str) -> str:
    """Return a page with its generated blocks empty; every other line keeps its number."""
    return _BLOCK.sub(lambda block: block[1] + "\n" * block[0].removeprefix(block[1]).count("\n"), page)


def _block(page: str, block: re.Match[str]) -> str:
    generators: dict[str, Callable[[str, int], str]] = {
        "api": api.objects,
        "errors": lambda module, _: api.errors(module),
        "metrics": lambda role, _: _metrics(role),
        "module": api.module,
        "options": lambda path, _: options.markdown(options.load(path)),
        "program": command_line.markdown,
    }
    name = block["generator"]
    if name not in generators:
        raise ValueError(f"Unknown generator {name!r} in {block[1]!r}: use one of {', '.join(generators)}.")
    before = _FENCED.sub("", _BLOCK.sub("", page[: block.start()]))
    level = len(_HEADING.findall(before)[-1])
    return f"{block[1]}\n\n{generators[name](block['arguments'], level).strip()}\n\n{END}"


def _metrics(role: str) -> str:
    rows = [
        f"| `{m.exported}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in METRICS.values()
        if m.role == role
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows])
