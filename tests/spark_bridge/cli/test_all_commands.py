"""What commands share: exit codes that no other test covers (old failures, warnings, no cluster, unexpected errors),
an example in the help, --json, and shell completion.

Also which node ``statestore drain`` takes; ``session/test_host_placement.py`` has what follows.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import typer.main
from click.testing import Result
from msgspec import structs
from ray._private import services

from spark_bridge.cli import main as program
from spark_bridge.cli import sources
from spark_bridge.cli.cluster_commands import node_named
from spark_bridge.cli.main import app
from spark_bridge.cli.sources import Source
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.host.instances import in_columns
from spark_bridge.overview.from_cluster import overview_of_cluster
from spark_bridge.overview.model import WARNING, Fault, Overview
from tests.command_line import CliRunner
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.patience import PATIENCE

Make = Callable[..., Stream]


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def overview(s: Stream) -> Overview:
    described = {**s.c.describe(), "namespace": "statestore"}
    hosts = [in_columns(h.describe()) for h in s.hosts.values()]
    return overview_of_cluster(described, hosts, now_ms=int(s.world.now * 1000))


def test_a_failure_is_an_error_until_the_query_runs_again(stream: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stream(batches=2)
    monkeypatch.setattr(Source, "looked_at", lambda _: overview(s))
    assert run("status").exit_code == 0
    s.c.serve_ended(s.registration, "ValueError: no")
    failed = json.loads(run("status", "--json", code=1).stdout)
    assert [f["kind"] for f in failed["faults"]] == ["query-failed"]
    assert s.c.register_query(structs.replace(s.registration, run_id="run2")).refusal is None
    (query,) = json.loads(run("status", "--json").stdout)["queries"]
    assert (query["run_id"], query["status"]) == ("run2", "running")


def test_warnings_are_not_an_error(stream: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = replace(overview(stream()), faults=(Fault(WARNING, "skew", "operator op", "It is.", "Spread it."),))
    monkeypatch.setattr(Source, "looked_at", lambda _: warned)
    assert "Spread it." in run("status").stdout


@pytest.mark.parametrize("args", [("status",), ("get", "op", "1"), ("logs",), ("token", "list"), ("drain", "m")])
def test_closed_port_is_reported_at_once(args: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    began = time.monotonic()
    result = run(*args, "--address", address, code=2)
    assert f"No Ray cluster answers at {address}" in result.stderr and not result.stdout
    assert time.monotonic() - began < PATIENCE / 2, "Ray itself tries for longer"


def test_unexpected_error_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Source) -> Overview:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(Source, "looked_at", broken)
    monkeypatch.setattr(sys, "argv", ["statestore", "status"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert "a fault of the program" in caplog.text, "with its traceback; without a handler, on stderr"


def test_damaged_savepoint_is_a_finding(stream: Make) -> None:
    s = stream()
    s.trigger()
    s.finish()
    (path,) = (str(made) for made in (s.world.root / "sp").iterdir())
    assert json.loads(run("savepoint", "describe", path, "--check-files", "--json").stdout)["version"] == 2
    file = next((s.world.root / "sp").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in run("savepoint", "describe", path, "--check-files", code=1).stderr
    told = json.loads(run("savepoint", "describe", path, "--check-files", "--json", code=1).stdout)
    assert file.name in told["damage"]
    run("savepoint", "describe", path)
    run("savepoint", "describe", str(s.world.root), code=2)


def test_one_of_several_clusters_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here, other = "10.0.0.1:6379", "10.0.0.2:6379"
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=here))
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {here, other})
    with sources.joined_ray(None, "statestore"):
        assert f"This is the one at {here}; others are at {other}. Name one" in capsys.readouterr().err
    for joined, found in ((here, {here}), (here, {"127.0.0.1:6379"}), ("127.0.0.1:6379", {here})):
        monkeypatch.setattr(ray, "get_runtime_context", lambda joined=joined: SimpleNamespace(gcs_address=joined))
        monkeypatch.setattr(services, "find_gcs_addresses", lambda found=found: found)
        with sources.joined_ray(None, "statestore"):
            assert not capsys.readouterr().err


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


NODES = [
    {"NodeID": "aaaaaa1", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one", "Alive": True},
    {"NodeID": "aaaaaa2", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": True},
    {"NodeID": "bbbbbb3", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": False},
    {"NodeID": "cccccc4", "NodeManagerAddress": "10.0.0.4", "NodeManagerHostname": "one", "Alive": True},
]


@pytest.mark.parametrize("name", ["aaaaaa2", "10.0.0.2", "two"])
def test_a_living_node_is_named_by_id_address_or_host_name(name: str) -> None:
    assert node_named(name, NODES) == "aaaaaa2"
    assert node_named("cccccc", NODES) == "cccccc4"


@pytest.mark.parametrize(("name", "why"), [("bbbbbb3", "No living"), ("one", "Several"), ("aaaaaa", "Several")])
def test_unknown_or_ambiguous_node_name_lists_the_nodes(name: str, why: str) -> None:
    with pytest.raises(EnvironmentProblemError, match=rf"{why} .*'{name}'; .*10.0.0.1 \(one, aaaaaa1\)"):
        node_named(name, NODES)
