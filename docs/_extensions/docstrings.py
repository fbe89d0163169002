"""Make reStructuredText of the project's docstrings, which are written to be read as plain text.

A block behind an empty line that is indented deeper than the paragraph before it is code. Letters may follow double
backticks.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_LITERAL = re.compile(r"(``[^`]+``)(\w?)")


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines with ``::`` before each block of code."""
    made: list[str] = []
    paragraph_indent, in_list, in_code = 0, False, False
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            in_code = in_code and indent > paragraph_indent
            behind_empty_line = i > 1 and not lines[i - 1].strip()
            if not in_code and behind_empty_line and indent > paragraph_indent and not in_list:
                in_code = True
                if not made[-2].endswith("::"):
                    made += ["::", ""]
            if not in_code:
                is_item = line.lstrip().startswith(("- ", "* "))
                in_list = is_item or (in_list and indent > 0)
                paragraph_indent = indent
        made.append(line if in_code else _LITERAL.sub(_separated, line))
    return made


def _separated(literal: re.Match[str]) -> str:
    return f"{literal[1]}\\ {literal[2]}" if literal[2] else literal[1]


def _process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hook."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
