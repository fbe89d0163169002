"""``statestore forget`` and ``audit``: remove keys for good, and see what was done to a state by hand."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.durable.audit_log import AuditLog, AuditRecord
from coordinator_actor.reading.stored_versions import find_state
from coordinator_actor.surgery.forgetting import ForgottenReport
from spark_bridge.cli.joined_ray import joined_ray, reachable_coordinator
from spark_bridge.cli.keys import key_of_words
from spark_bridge.cli.output import AsJson, errors_explained, filled, printer, show
from spark_bridge.cli.sources import Address, CheckpointOption, CoordinatorName, Namespace, StateLocation
from spark_bridge.cli.state.storage_commands import CheckpointArgument
from spark_bridge.cli.storage_options import Option, options_of
from spark_bridge.overview.model import to_plain

STDIN = Path("-")
SURGERY_COORDINATOR_SECONDS = 60.0
"""A coordinator that does not answer for this many seconds is given up."""


def forget(
    operator: Annotated[str, typer.Argument(help="The operator that has the state.")],
    key: Annotated[
        list[str] | None,
        typer.Argument(
            help="A key: its value, or JSON, or the values with commas between. Every user of this machine can read it "
            "in the process list: give keys that name people in --keys-file."
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with a key a line, written as KEY is; - is the standard input."),
    ] = None,
    query: Annotated[str | None, typer.Option(help="The name or id of a query that runs.")] = None,
    checkpoint: CheckpointOption = None,
    reference: Annotated[str | None, typer.Option(help="Stands in the audit log, as the number of a request.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    state_location: StateLocation = None,
    storage_option: Option = None,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Remove keys of OPERATOR from a query's state, and every trace of them from its checkpoint. They do not come back.

    With --query of one that runs; with --checkpoint of one that does not. A query that runs on its checkpoint in the
    Ray cluster of this machine, or at --address, forgets as with --query.

    Examples: statestore forget user_totals --keys-file gone.txt --query clicks; statestore forget user_totals
    --keys-file - --checkpoint s3://bucket/ck --reference DSR-1271 --yes < gone.txt
    """
    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort
    from spark_bridge.state_surgery.forget_keys import forget_keys

    if keys_file == STDIN and not yes:
        raise typer.BadParameter(
            "--keys-file - takes the keys from where the answer to the question would come: give --yes"
        )
    texts = [*(key or []), *_lines(keys_file)]
    if (query is None) == (checkpoint is None):
        raise typer.BadParameter(
            "give --query NAME of a query that runs, or --checkpoint LOCATION of one that does not"
        )
    if not texts:
        raise typer.BadParameter("give --keys-file with a key a line, or a KEY")
    where = query or checkpoint
    assert where is not None
    if not yes:
        typer.confirm(f"Remove {len(texts)} keys of {operator} from {where} for good?", abort=True, err=True)

    def progress(step: str) -> None:
        if not as_json:
            printer().print(step, markup=False, soft_wrap=True)

    def run(port: RayCoordinatorPort | None) -> ForgottenReport:
        return forget_keys(
            where,
            operator,
            lambda schema: [key_of_words([text], schema) for text in texts],
            reference=reference,
            state_location=state_location,
            storage_options=options_of(storage_option),
            progress=progress,
            coordinator=port,
        )

    with errors_explained():
        if checkpoint is not None:
            with reachable_coordinator(address, namespace, coordinator, SURGERY_COORDINATOR_SECONDS) as port:
                report = run(port)
        else:
            with joined_ray(address, namespace):
                report = run(RayCoordinatorPort(namespace, coordinator, SURGERY_COORDINATOR_SECONDS))
    show(lambda: to_plain(report), lambda: _report_view(report), as_json=as_json)


def _lines(keys_file: Path | None) -> list[str]:
    if keys_file is None:
        return []
    text = sys.stdin.read() if keys_file == STDIN else keys_file.read_text()
    return [line for line in text.splitlines() if line]


def _report_view(report: ForgottenReport) -> str:
    return (
        f"Done: no version up to {report.version} of {report.operator} has a row of the {report.keys} keys any more, "
        f"and no file has their bytes ({report.rows} rows, {report.files} files removed)."
    )


def audit(
    checkpoint: CheckpointArgument,
    state_location: StateLocation = None,
    storage_option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Show what was done by hand to the state at CHECKPOINT: when, by whom, and for which reference.

    Example: statestore audit s3://bucket/ck --json
    """
    with errors_explained():
        place = find_state(checkpoint, state_location, options_of(storage_option))
        records = AuditLog(CheckpointStorage.open(place.state_location, place.options)).read()
    show(lambda: to_plain(records), lambda: _audit_view(records), as_json=as_json)


def _audit_view(records: list[AuditRecord]) -> RenderableType:
    def when(record: AuditRecord) -> str:
        return datetime.fromtimestamp(record.at_ms / 1000, timezone.utc).isoformat(timespec="seconds")

    rows = (
        (
            when(r),
            r.what,
            r.status,
            ", ".join(r.operators),
            r.version,
            ", ".join(f"{n} {name}" for name, n in r.counts.items()),
            r.by,
            r.reference or "",
        )
        for r in records
    )
    return filled(rows, "at", "what", "status", "operators", "version", "counts", "by", "reference")
