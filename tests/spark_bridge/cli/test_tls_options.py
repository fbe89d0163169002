"""Commands that ask hosts for state take certificates as the query client does, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import Result

from spark_bridge.cli.main import app
from spark_bridge.transport.tls import TlsConf
from tests.command_line import CliRunner
from tests.spark_bridge.certificates import Files
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def cluster(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One host that asks clients for certificates; its own names it, not its address."""
    tls = TlsConf(files.ca, **files.by_name, client_auth=True, server_name="hosts.example")
    made = Cluster(tmp_path_factory.mktemp("cluster"), hosts=1, tls=tls)
    made.batch({7: (3, "seven")})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def outside(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATESTORE_ADDRESS", cluster.hosts[0].address)
    monkeypatch.setenv("STATESTORE_TOKEN", TOKEN)


def get(*options: str) -> Result:
    return CliRunner().invoke(app, ["get", "totals", "7", "--json", *options])


def options(files: Files) -> dict[str, str]:
    return {
        "--tls-ca": files.ca,
        "--tls-certificate": files.client["certificate"],
        "--tls-key": files.client["key"],
        "--tls-server-name": "hosts.example",
    }


def test_a_host_with_tls_is_asked_by_options_and_by_the_environment(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(files)
    found = get(*(word for pair in given.items() for word in pair))
    assert found.exit_code == 0 and '"seven"' in found.stdout, found.output
    for option, value in given.items():
        monkeypatch.setenv(f"STATESTORE_{option.removeprefix('--').replace('-', '_').upper()}", value)
    assert '"seven"' in get().stdout


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (["--tls-ca"], "give --tls-ca too"),
        (["--tls-key"], "no key="),
        (["--tls-certificate", "--tls-key"], "certificate"),
        (["--tls-server-name"], "certificate"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_missing_options_are_named(files: Files, left_out: list[str], said: str) -> None:
    given = {option: value for option, value in options(files).items() if option not in left_out}
    refused = get(*(word for pair in given.items() for word in pair))
    assert refused.exit_code != 0 and said in " ".join(refused.output.replace("│", " ").split()), refused.output
