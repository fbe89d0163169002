"""All commands of a Typer application, with their arguments and options as it declares them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import typer.main

from tests.docs.pages import ROOT
from tests.docs.reference.docstrings import as_markdown, inline

PROJECT = ROOT / "pyproject.toml"
_NOT_SHOWN = {"help"}


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Give every command with its full name, groups' commands behind one another."""
    for name, one in getattr(command, "commands", {}).items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{path} {name}")
        else:
            yield f"{path} {name}", one


def markdown(script: str, level: int) -> str:
    """Return a section for each command of a console script of pyproject.toml, one heading below ``level``. Raises
    ``ValueError`` for an unknown script.
    """
    entry = re.search(rf'^{re.escape(script)} = "(.+):\w+"$', PROJECT.read_text(), re.MULTILINE)
    if entry is None:
        raise ValueError(f"{PROJECT} has no console script {script!r}.")
    root = typer.main.get_command(import_module(entry[1]).app)
    return "\n\n".join(_section(path, command, level) for path, command in commands(root, root.name or ""))


def _section(path: str, command: Any, level: int) -> str:
    context = typer.Context(command, info_name=path)
    pieces = [
        piece.strip("{}").upper() if piece.startswith("{") else piece for piece in command.collect_usage_pieces(context)
    ]
    usage = f"```text\n{' '.join([path, *pieces])}\n```"
    section = [f"{'#' * (level + 1)} {path}", as_markdown(inspect.cleandoc(command.help or "")), usage]
    options = [p for p in command.get_params(context) if p.param_type_name == "option" and p.name not in _NOT_SHOWN]
    if options:
        records = [option.get_help_record(context) for option in options]
        rows = ["| option | meaning |", "| --- | --- |"]
        rows += [f"| `{_cell(names)}` | {_cell(inline(meaning))} |" for names, meaning in records]
        section.append("\n".join(rows))
    return "\n\n".join(section)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
