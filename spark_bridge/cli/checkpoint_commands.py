"""Commands about stored state: ``savepoint``, ``checkpoint``, ``files``, ``verify``, ``forget``, ``audit``.

All but ``forget`` run without Ray and Spark.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from backends.exceptions import DamagedFileError, MissingFileError, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.durable.records import AuditRecord, read_audit_records
from coordinator_actor.reading.stored_files import StoredFile, stored_files
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.reading.verification import Verification, damages_of_manifests, verify_version
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.cli import output, sources
from spark_bridge.overview.model import number, size, to_plain

app = typer.Typer(name="savepoint", help="List, describe, restore and delete savepoints.", no_args_is_help=True)


@app.command("list")
def list_command(base: str, storage_option: sources.Option = None, as_json: output.AsJson = False) -> None:
    """List the savepoints directly below the directory BASE.

    Example: statestore savepoint list s3://bucket/savepoints --json
    """
    from spark_bridge.session.savepoints import list_savepoints

    with output.errors_explained():
        savepoints = list_savepoints(base, sources.options_of(storage_option))
    output.show(
        lambda: [_plain(info) for info in savepoints],
        lambda: output.filled(map(_cells, savepoints), "path", "query", "version", "rows", "bytes"),
        as_json=as_json,
    )


def _cells(info: SavepointInfo) -> tuple[object, ...]:
    metadata = info.metadata
    if metadata is None:
        return info.path, f"damaged: {info.damage}"
    return info.path, metadata.query_name or metadata.query_id, metadata.version, f"{info.rows:,}", f"{info.size:,}"


@app.command()
def describe(
    path: str,
    check_files: Annotated[
        bool, typer.Option("--check-files", help="Read every file and compare it with its checksum.")
    ] = False,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Describe the savepoint at PATH: query, version, rows, operators. The exit code is 1 if it is damaged.

    Example: statestore savepoint describe s3://bucket/savepoints/savepoint-clicks-7 --check-files
    """
    from spark_bridge.session.savepoints import describe_savepoint

    with output.errors_explained():
        try:
            info = describe_savepoint(path, sources.options_of(storage_option), check_files=check_files)
        except DamagedFileError as error:
            info = SavepointInfo(path, None, str(error))
    metadata = info.metadata
    if metadata is None:
        if as_json:
            typer.echo(output.json_line(_plain(info)))
        else:
            output.complain(str(info.damage))
        raise typer.Exit(output.FOUND)
    lines = [
        f"Savepoint {metadata.checkpoint_id} of query {metadata.query_name or metadata.query_id} at {info.path}",
        f"State after batch {metadata.batch_id} (version {metadata.version}), {info.rows:,} rows, {info.size:,} bytes",
    ]
    lines += [
        f"  {operator.name}/{variable.name}: {variable.rows:,} rows, {operator.num_partitions} partitions, "
        f"{operator.backend}; {path.rstrip('/')}/operators/{operator.name}/{variable.name}/*.parquet"
        for operator in metadata.operators
        for variable in operator.variables
    ]
    output.show(lambda: _plain(info), lambda: "\n".join(lines), as_json=as_json)


@app.command()
def delete(path: str, storage_option: sources.Option = None, as_json: output.AsJson = False) -> None:
    """Remove the savepoint at PATH.

    Example: statestore savepoint delete s3://bucket/savepoints/savepoint-clicks-7
    """
    from spark_bridge.session.savepoints import delete_savepoint

    with output.errors_explained():
        delete_savepoint(path, sources.options_of(storage_option))
    output.show(lambda: {"removed": path}, lambda: f"Removed {path}", as_json=as_json)


@app.command()
def restore(
    path: str,
    checkpoint_location: str,
    num_partitions: Annotated[int | None, typer.Option(min=1, help="Of all operators; default: as it was.")] = None,
    backend: Annotated[str | None, typer.Option(help="rocksdb or file; default: as it was.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator. Repeatable.")] = None,
    state_only: Annotated[bool, typer.Option("--state-only", help="For a new query that starts with batch 0.")] = False,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Make the new CHECKPOINT_LOCATION from the savepoint at PATH; a query started there continues after it.

    Example: statestore savepoint restore s3://bucket/savepoints/savepoint-clicks-7 s3://bucket/ck2 --num-partitions 8
    """
    from spark_bridge.session.savepoints import restore_savepoint

    with output.errors_explained():
        restored = restore_savepoint(
            path,
            checkpoint_location,
            num_partitions,
            backend,
            operator,
            state_only=state_only,
            storage_options=sources.options_of(storage_option),
            progress=output.steps_printed(as_json=as_json),
        )
    first_batch = 0 if restored.batch_id is None else restored.batch_id + 1
    ready = f"{restored.checkpoint_location} is ready: the query begins with batch {first_batch}"
    output.show(lambda: restored, lambda: ready, as_json=as_json)


def _plain(info: SavepointInfo) -> dict[str, Any]:
    """Return the description of a savepoint for people, without the names of its files."""
    metadata = info.metadata
    if metadata is None:
        return {"path": info.path, "damage": info.damage}
    return {
        "path": info.path,
        "checkpoint_id": metadata.checkpoint_id,
        "query_id": metadata.query_id,
        "query_name": metadata.query_name,
        "version": metadata.version,
        "batch_id": metadata.batch_id,
        "rows": info.rows,
        "bytes": info.size,
        "operators": [
            {
                "name": o.name,
                "num_partitions": o.num_partitions,
                "backend": o.backend,
                "variables": [{"name": v.name, "rows": v.rows} for v in o.variables],
            }
            for o in metadata.operators
        ],
    }


# ``statestore checkpoint ...``: checkpoints that were moved or copied, without a running Ray or Spark.


_HELP = "Bind state that is stored outside its checkpoint to a moved or copied checkpoint."
checkpoint_app = typer.Typer(name="checkpoint", help=_HELP, no_args_is_help=True)

MovedStateLocation = Annotated[
    str, typer.Option(help="The directory of spark.statestore.location (state_location=) of the session.")
]


@checkpoint_app.command()
def move(
    checkpoint_location: str,
    state_location: MovedStateLocation,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Bind the state to CHECKPOINT_LOCATION, the new location of its checkpoint.

    Example: statestore checkpoint move s3://new/ck --state-location s3://bucket/state
    """
    from coordinator_actor.durable.moved_checkpoints import move_checkpoint

    with output.errors_explained():
        bound = move_checkpoint(checkpoint_location, state_location, sources.options_of(storage_option))
    done = "now belongs" if bound.is_new else "belongs already"
    text = f"The state at {bound.state_location} {done} to {bound.checkpoint_location}"
    output.show(lambda: bound, lambda: text, as_json=as_json)


@checkpoint_app.command()
def fork(
    checkpoint_location: str,
    state_location: MovedStateLocation,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Give the copy of a checkpoint at CHECKPOINT_LOCATION its own state; the original stays as it is.

    Example: statestore checkpoint fork ck-copy/ --state-location /mnt/state --json
    """
    from coordinator_actor.durable.moved_checkpoints import fork_checkpoint

    with output.errors_explained():
        options = sources.options_of(storage_option)
        steps = output.steps_printed(as_json=as_json)
        bound = fork_checkpoint(checkpoint_location, state_location, options, progress=steps)
    already = "" if bound.is_new else " already"
    where = f"{already}, at {bound.state_location}, as query {bound.query_id}"
    output.show(lambda: bound, lambda: f"{bound.checkpoint_location} has its own state{where}", as_json=as_json)


# ``statestore files``, ``verify`` and ``diff``: the files and versions of a query's state, from storage alone.


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Spark's checkpoint location of the query.")
]
VersionOption = Annotated[
    int | None, typer.Option(help="A version that is kept; version N+1 is the state after batch N.")
]


def files(
    checkpoint: CheckpointArgument,
    version: VersionOption = None,
    state_location: sources.StateLocation = None,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Show every file of the state at CHECKPOINT: its kind, and the reason why it is kept.

    With --version only the files that this version can be loaded from.

    Examples: statestore files ck/; statestore files s3://bucket/ck --version 12 --json
    """
    with output.errors_explained():
        place = find_state(checkpoint, state_location, sources.options_of(storage_option))
        versions = StateVersions.look(place, passes_over_damage=True)
        files_in_use = stored_files(versions, version)
    output.show(lambda: to_plain(files_in_use), lambda: _files_view(files_in_use), as_json=as_json)
    for what in versions.damages.values():
        output.complain(what)
    if versions.damages:
        raise typer.Exit(output.DAMAGED)


def _files_view(files: list[StoredFile]) -> RenderableType:
    def kept(file: StoredFile) -> str:
        most = 3
        more = len(file.kept_by) - most
        return ", ".join(file.kept_by[:most]) + (f" and {more} more" if more > 0 else "") or file.why

    rows = ((f.path, f.kind, number(f.size), f.version, kept(f)) for f in files)
    counts, sums = Counter(file.kind for file in files), Counter[str]()
    for file in files:
        sums[file.kind] += file.size
    kinds = ((kind, number(counts[kind]), size(sums[kind])) for kind in sorted(sums))
    unneeded = [file for file in files if not file.kept_by]
    return Group(
        output.filled(rows, "path", "kind", "bytes", "version", "kept by"),
        output.filled(kinds, "kind", "files", "size", title="All"),
        Text(f"{len(unneeded)} files, {size(sum(f.size for f in unneeded))}, are kept by nothing."),
    )


def verify(
    checkpoint: CheckpointArgument,
    version: VersionOption = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows", help="Also load every partition, as a host would, and compare its indexes with its rows."
        ),
    ] = False,
    state_location: sources.StateLocation = None,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Read every file that a version of the state at CHECKPOINT can be loaded from, and name the damage.

    By default the last completed version. The exit code is 1 if a file is damaged or missing, also if the version
    can still be loaded without it, and if --rows finds an index that differs from the rows.

    Examples: statestore verify ck/; statestore verify ck/ --version 12 --rows --json
    """
    with output.errors_explained():
        place = find_state(checkpoint, state_location, sources.options_of(storage_option))
        try:
            versions = StateVersions.look(place, passes_over_damage=True)
        except (DamagedFileError, MissingFileError) as error:
            # The newest manifest: without it, the files of each version are unknown.
            raise _unreadable(str(error), [], as_json) from error
        try:
            verification = _verified(versions, version, rows, as_json)
        except (DamagedFileError, VersionNotFoundError) as error:
            if not versions.damages:
                raise
            raise _unreadable(str(error), [to_plain(d) for d in damages_of_manifests(versions)], as_json) from error
    plain = {**to_plain(verification), "is_sound": verification.is_sound}
    output.show(lambda: plain, lambda: _verified_view(verification), as_json=as_json)
    if not verification.is_sound:
        raise typer.Exit(output.FOUND)


def _verified(versions: StateVersions, version: int | None, rows: bool, as_json: bool) -> Verification:
    from spark_bridge.operators.index_entries import index_differences

    verify = partial(verify_version, versions, version, reads_rows=rows, differences_in=index_differences)
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        return verify()
    with console.status("Reading the files") as status:
        return verify(progress=lambda done, total: status.update(f"Read {done} of {total} files"))


def _unreadable(what: str, damages: list[Any], as_json: bool) -> typer.Exit:
    """Report damage of manifests that makes the files of a version unknown. Return the exception that ends the command.

    The JSON has ``version`` (null), ``damages`` and ``is_sound``, where a verified version has them too, and ``error``.
    """
    unnamed = {"path": None, "operator": None, "partition": None, "version": None, "what": what}
    plain = {"version": None, "damages": damages or [unnamed], "is_sound": False, "error": what}
    output.show(lambda: plain, lambda: Text(what, "red"), as_json=as_json)
    return typer.Exit(output.FOUND)


def _verified_view(verification: Verification) -> RenderableType:
    lines = [
        Text(d.what if d.partition is None else f"{d.operator}/{d.partition}, version {d.version}: {d.what}", "red")
        for d in (*verification.damages, *verification.differences)
    ]
    read = f"Read {number(verification.files)} files of version {verification.version}, {size(verification.nbytes)}"
    if verification.rows is not None:
        read += f", {number(verification.rows)} rows"
    style = ""
    if verification.is_sound:
        read += ": all are as they were written."
    elif verification.lost:
        read += f". Version {verification.version} cannot be loaded: {', '.join(verification.lost)}."
        style = "bold red"
    elif not verification.damages:
        read += ": the files are as they were written. rewrite_state builds the indexes from the rows again."
    elif all(d.operator is None for d in verification.damages):
        read += ": these match their checksums. Other versions or the query's start need the damaged files."
    else:
        read += f". Version {verification.version} can still be loaded, by older snapshots and changelogs."
    return Group(*lines, Text(read, style))


# ``statestore forget`` and ``audit``: remove keys permanently, and show manual changes of a state.


STDIN = Path("-")
SURGERY_COORDINATOR_SECONDS = 60.0
"""Seconds to wait for a coordinator."""


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
        typer.Option(metavar="FILE", help="A file with one key per line, written like KEY; - reads standard input."),
    ] = None,
    query: Annotated[str | None, typer.Option(help="The name or id of a query that runs.")] = None,
    checkpoint: sources.CheckpointOption = None,
    reference: Annotated[
        str | None, typer.Option(help="A note for the audit log, such as the number of a request.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    state_location: sources.StateLocation = None,
    storage_option: sources.Option = None,
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
    coordinator: sources.CoordinatorName = COORDINATOR_NAME,
    as_json: output.AsJson = False,
) -> None:
    """Remove keys of OPERATOR from a query's state, and every trace of them from its checkpoint. They do not come back.

    Name a running query by --query, or give the checkpoint of a stopped one as --checkpoint. If a query runs on that
    checkpoint in the Ray cluster of this machine, or of --address, it forgets the keys as with --query.

    Examples: statestore forget user_totals --keys-file gone.txt --query clicks; statestore forget user_totals
    --keys-file - --checkpoint s3://bucket/ck --reference DSR-1271 --yes < gone.txt
    """
    from coordinator_actor.reference import RayCoordinatorPort
    from spark_bridge.state_surgery.forget_keys import forget_keys

    if keys_file == STDIN and not yes:
        raise typer.BadParameter("--keys-file - reads stdin, which the confirmation would read as well: give --yes")
    texts = [*(key or []), *_lines(keys_file)]
    if (query is None) == (checkpoint is None):
        raise typer.BadParameter(
            "give --query NAME of a query that runs, or --checkpoint LOCATION of one that does not"
        )
    if not texts:
        raise typer.BadParameter("give a KEY, or --keys-file with one key per line")
    where = query or checkpoint
    assert where is not None
    if not yes:
        typer.confirm(f"Remove {len(texts)} keys of {operator} from {where} permanently?", abort=True, err=True)

    with output.errors_explained(), ExitStack() as stack:
        place = (namespace, coordinator, SURGERY_COORDINATOR_SECONDS)
        if checkpoint is None:
            stack.enter_context(sources.joined_ray(address, namespace))
            port: RayCoordinatorPort | None = RayCoordinatorPort(*place)
        else:
            port = stack.enter_context(sources.reachable_coordinator(address, *place))
        report = forget_keys(
            where,
            operator,
            lambda schema: [sources.key_of_words([text], schema) for text in texts],
            reference=reference,
            state_location=state_location,
            storage_options=sources.options_of(storage_option),
            progress=output.steps_printed(as_json=as_json),
            coordinator=port,
        )
    done = (
        f"Done: no version up to {report.version} of {report.operator} has a row of the {report.keys} keys any more, "
        f"and no file has their bytes ({report.rows} rows, {report.files} files removed)."
    )
    output.show(lambda: to_plain(report), lambda: done, as_json=as_json)


def _lines(keys_file: Path | None) -> list[str]:
    if keys_file is None:
        return []
    # Python has turned \r\n into \n. Not splitlines(): it also splits at U+2028, \x1c and others, which a key may have,
    # and the parts may be other keys. Editors on Windows begin a file with a byte order mark.
    text = sys.stdin.read() if keys_file == STDIN else keys_file.read_text(encoding="utf-8")
    return [line for line in text.removeprefix("\ufeff").split("\n") if line]


def audit(
    checkpoint: CheckpointArgument,
    state_location: sources.StateLocation = None,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the manual changes to the state at CHECKPOINT: when, by whom, and with which reference.

    Example: statestore audit s3://bucket/ck --json
    """
    with output.errors_explained():
        place = find_state(checkpoint, state_location, sources.options_of(storage_option))
        records = read_audit_records(CheckpointStorage.open(place.state_location, place.options))
    output.show(lambda: to_plain(records), lambda: _audit_view(records), as_json=as_json)


def _audit_view(records: list[AuditRecord]) -> RenderableType:
    rows = (
        (
            datetime.fromtimestamp(r.at_ms / 1000, timezone.utc).isoformat(timespec="seconds"),
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
    return output.filled(rows, "at", "what", "status", "operators", "version", "counts", "by", "reference")
