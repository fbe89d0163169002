"""The directive ``command-line``: all commands of a Typer application with their arguments and options, as it
declares them.

```{command-line} spark_bridge.cli.main:app
```
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import typer.main
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_NOT_SHOWN = {"help"}


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Give every command with its full name, groups' commands behind one another."""
    for name, one in getattr(command, "commands", {}).items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{path} {name}")
        else:
            yield f"{path} {name}", one


def markdown(application: typer.Typer) -> str:
    """Return a section for each command of the application."""
    root = typer.main.get_command(application)
    return "\n\n".join(_section(path, command) for path, command in commands(root, root.name or ""))


def _section(path: str, command: Any) -> str:
    context = typer.Context(command, info_name=path)
    pieces = [
        piece.strip("{}").upper() if piece.startswith("{") else piece for piece in command.collect_usage_pieces(context)
    ]
    lines = [
        f"## {path}",
        "",
        inspect.cleandoc(command.help or ""),
        "",
        "```text",
        " ".join([path, *pieces]),
        "```",
        "",
    ]
    options = [p for p in command.get_params(context) if p.param_type_name == "option" and p.name not in _NOT_SHOWN]
    if options:
        records = [option.get_help_record(context) for option in options]
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in records]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def module_of(script: str) -> str:
    """Return the module of a console script, as pyproject.toml names it. Raises ``ValueError`` if there is no such
    script.
    """
    found = re.search(rf'^{re.escape(script)} = "(.+):\w+"$', PROJECT.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{PROJECT} has no console script {script!r}.")
    return found[1]


class CommandLineDirective(SphinxDirective):
    """Write the sections of one program."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        application = import_module(module_of(self.arguments[0])).app
        return self.parse_text_to_nodes(markdown(application), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-line", CommandLineDirective)
    return {"parallel_read_safe": True}
