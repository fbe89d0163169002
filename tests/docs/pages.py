"""The Markdown pages of the project: their blocks of code, and running them page by page.

Every block marked ``python`` is run, in the order of the page and in one namespace. Comments, which readers do not see,
may be between the blocks of a page:

    <!-- setup                     code that is run here and is not shown
    write_clicks("clicks")
    -->

    <!-- check                     the same, for assertions
    assert client.get("user_totals", 42)["n"] == 20
    -->

    <!-- shown only: needs a bucket on S3 -->     the next block is not run, for this reason

In a block marked ``sh``, the lines with ``statestore`` are run, and the targets of ``make`` must exist. All other
commands need a "shown only". Blocks marked ``py`` are signatures and examples of docstrings, which are not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w{}-]*)\s*(?P<rest>.*)$")
_SHOWN_ONLY = re.compile(r"^<!-- shown only: (?P<reason>.+) -->$")
_HIDDEN = re.compile(r"^<!-- (?P<kind>setup|check)$")
_NEEDS_SPARK = re.compile(r"\b(init_spark|attach|SparkSession|QueryableStateClient)\b")
RUN, SHELL = "python", "sh"


@dataclass(frozen=True)
class Block:
    """One block of code: its language, its first line's number in the page, and why it is only shown, if it is."""

    language: str
    line: int
    code: str
    shown_only: str | None = None
    is_hidden: bool = False


@dataclass(frozen=True)
class Page:
    """One page; ``name`` is its path in the repository."""

    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    def blocks(self) -> list[Block]:
        """The blocks, the hidden ones among them. Raises ``ValueError`` for a mark that belongs to no block."""
        return list(_blocks(self.path.read_text().splitlines(), self.name))

    def run_blocks(self) -> list[Block]:
        """The blocks that are run."""
        return [b for b in self.blocks() if b.language in (RUN, SHELL) and b.shown_only is None]

    @property
    def needs_spark(self) -> bool:
        """Whether the code of the page uses Spark or Ray."""
        return any(
            _NEEDS_SPARK.search(b.code) if b.language == RUN else bool(commands(b, "statestore"))
            for b in self.run_blocks()
        )


def pages() -> list[Page]:
    """Return all pages of the project in alphabetical order."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "README.md"]
    return [Page(str(p.relative_to(ROOT))) for p in sorted(found) if "_build" not in p.parts]


def _blocks(lines: list[str], name: str) -> Iterator[Block]:
    reason: str | None = None
    rest = iter(enumerate(lines, start=1))
    for number, line in rest:
        if hidden := _HIDDEN.match(line):
            yield Block(RUN, number + 1, "\n".join(_until(rest, "-->", name, number)), is_hidden=True)
            assert hidden
        elif mark := _SHOWN_ONLY.match(line):
            reason = mark["reason"]
        elif fence := _FENCE.match(line):
            cut = len(fence["indent"])
            code = [one[cut:] for one in _until(rest, fence["ticks"], name, number)]
            yield Block(fence["language"], number + 1, "\n".join(code), reason)
            reason = None
        elif reason is not None and line.strip():
            raise ValueError(f"{name}:{number}: 'shown only' stands right before a block, and here is none")


def _until(lines: Iterator[tuple[int, str]], end: str, name: str, number: int) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == end:
            return
        yield line
    raise ValueError(f"{name}:{number}: the block that begins here does not end with {end}")


def run(page: Page, shell: Any = None, blocks: int | None = None) -> dict[str, Any]:
    """Run the blocks of a page, or only the first ``blocks`` of them, and return their namespace.

    ``shell`` is called with the words of a ``statestore`` line; the code that follows has its result as
    ``shell_output``.
    """
    # As in a program: functions are pickled to Spark's workers by value.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in page.run_blocks()[:blocks]:
        if block.language == SHELL:
            for words in commands(block, "statestore"):
                namespace["shell_output"] = shell(words)
            continue
        # With as many empty lines before it, errors name lines of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page.path), "exec", dont_inherit=True)
        exec(code, namespace)
    return namespace


def commands(block: Block, program: str) -> list[list[str]]:
    """Return the lines of a shell block that call ``program``, each as its words."""
    found = [shlex.split(line, comments=True) for line in block.code.replace("\\\n", " ").splitlines()]
    return [words for words in found if words and words[0] == program]


def unknown_commands(block: Block) -> list[str]:
    """Return the lines of a shell block that nothing checks: neither ``statestore`` nor a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= set(re.findall(r"^(?:test|lint)[\w -]*(?=:)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] == "statestore" or (words[0] == "make" and words[1] in targets):
            continue
        unknown.append(line)
    return unknown
