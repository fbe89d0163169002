"""``statestore grafana``: the dashboard for Grafana, where Ray's own set-up or Kubernetes finds the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spark_bridge.cli.output import FAILED, AsJson, complain, json_line
from spark_bridge.grafana.dashboard import config_map, dashboard, written

DIRECTORY_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Where Ray writes its dashboards, if it is set; Ray's own default is in the directory of its session."""

app = typer.Typer(name="grafana", help="The dashboard for Grafana.", no_args_is_help=True)


@app.command()
def install(
    directory: Annotated[
        Path | None,
        typer.Argument(help=f"From which Grafana takes dashboards. Default: the environment's {DIRECTORY_VARIABLE}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the dashboard where Ray's Grafana set-up keeps its own; Grafana shows the file within seconds.

    Example: statestore grafana install /var/lib/grafana/dashboards/ray
    """
    given = os.environ.get(DIRECTORY_VARIABLE) if directory is None else str(directory)
    if not given:
        complain(
            f"Where does Grafana look? Name the directory, or set {DIRECTORY_VARIABLE} as for 'ray start': the "
            "directory must outlive Ray's session."
        )
        raise typer.Exit(FAILED)
    if not Path(given).is_dir():
        complain(f"{given} is no directory. Make it, and give it to Grafana's provisioning of dashboards.")
        raise typer.Exit(FAILED)
    try:
        path = written(Path(given))
    except OSError as error:
        complain(f"The dashboard could not be written to {given}: {error}")
        raise typer.Exit(FAILED) from error
    typer.echo(json_line({"path": str(path)}) if as_json else f"Written: {path}")


@app.command("show")
def show_dashboard(as_json: AsJson = False) -> None:
    """Print the dashboard, to import it by hand: as JSON, with and without --json.

    Example: statestore grafana show > dashboard.json
    """
    typer.echo(json_line(dashboard()))


@app.command("config-map")
def show_config_map(
    namespace: Annotated[str | None, typer.Option(help="The namespace of the ConfigMap. Default: kubectl's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a ConfigMap with the dashboard, for Grafana on Kubernetes: as JSON, with and without --json.

    Example: statestore grafana config-map --namespace monitoring | kubectl apply -f -
    """
    typer.echo(json_line(config_map(namespace)))
