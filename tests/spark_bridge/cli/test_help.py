"""Every command has an example in its help, --json, and shell completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from spark_bridge.cli.main import app
from tests.command_line import CliRunner


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, one in command.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{path} {name}")
        else:
            yield f"{path} {name}", one


COMMANDS: dict[str, Any] = dict(commands(typer.main.get_command(app), "statestore"))

REFERENCE = Path(__file__).parents[3] / "docs/reference/command-line.md"

GO_ON = ("statestore changes", "statestore demo", "statestore run", "statestore serve", "statestore ui")
"""These commands answer nothing: they run something, and say how it goes."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_json(name: str) -> None:
    command = COMMANDS[name]
    assert "Example" in command.help and f"{name} " in f"{command.help} ", name
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--json" in options or name in GO_ON
    assert not [option for option in options if "token" in option or "secret" in option], "arguments are visible to all"


def test_completion_can_be_shown() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in result.stdout and "--show-completion" in result.stdout


def test_completion_names_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_STATESTORE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "statestore che")
    monkeypatch.setenv("COMP_CWORD", "1")
    result = CliRunner().invoke(app, [], prog_name="statestore")
    assert sorted(result.stdout.split()) == ["checkpoint", "checkpoints"]


def test_the_reference_has_the_codes_of_each_command() -> None:
    section = REFERENCE.read_text().partition("## Exit codes")[2].partition("## Commands")[0]
    named = set(re.findall(r"`([a-z-]+(?: [a-z]+)?)`", section))
    told = [name.removeprefix("statestore ") for name in COMMANDS]
    assert [name for name in told if name not in named and name.split()[0] not in named | {"run"}] == []
