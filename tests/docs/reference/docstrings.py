"""Make Markdown of the project's docstrings, which are written to be read as plain text.

Lines behind an empty line that are indented deeper than the paragraph before them are code.
"""

from __future__ import annotations

import ast
import re
import textwrap

_LITERAL = re.compile(r"(``.+?``(?!`))", re.DOTALL)
_ITEM = re.compile(r"^(- |\* )")


def as_markdown(docstring: str) -> str:
    """Return a docstring without its indentation as Markdown."""
    pieces: list[str] = []
    prose: list[str] = []
    code: list[str] = []
    paragraph_indent = 0
    lines = docstring.strip().splitlines()
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        is_behind_empty_line = i > 0 and not lines[i - 1].strip()
        if code and (not line.strip() or indent > paragraph_indent):
            code.append(line)
            continue
        if code:
            pieces.append(_fenced(code))
            code = []
        if line.strip() and is_behind_empty_line and indent > paragraph_indent:
            pieces.append(_prose(prose))
            prose, code = [], [line]
            continue
        prose.append(line)
        if line.strip():
            paragraph_indent = indent + 2 if _ITEM.match(line.lstrip()) else indent
    pieces.append(_fenced(code) if code else _prose(prose))
    return "\n\n".join(piece for piece in pieces if piece)


def inline(text: str) -> str:
    """Return a line or a paragraph as Markdown: literals in single backticks, and no signs that Markdown would take for
    HTML or emphasis, except in ``**bold**`` words.
    """
    parts = _LITERAL.split(text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = part[1:-1] if "`" not in part[2:-2] else part
        else:
            parts[i] = re.sub(r"(?<!\*)\*(?!\*)(?! )|<", r"\\\g<0>", part)
    return "".join(parts)


def _prose(lines: list[str]) -> str:
    return inline("\n".join(lines).strip("\n").removesuffix("::"))


def _fenced(lines: list[str]) -> str:
    code = textwrap.dedent("\n".join(lines)).strip("\n")
    try:
        ast.parse(code)
    except SyntaxError:
        return f"```text\n{code}\n```"
    return f"```py\n{code}\n```"
