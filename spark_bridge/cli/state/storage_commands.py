"""``statestore files``, ``verify`` and ``diff``: the files and versions of a query's state, from storage alone."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from backends.exceptions import DamagedFileError, MissingFileError, VersionNotFoundError
from coordinator_actor.reading.stored_files import StoredFile, stored_files
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.reading.verification import Verification, damages_of_manifests, verify_version
from spark_bridge.cli.output import DAMAGED, FOUND, AsJson, complain, errors_explained, filled, show
from spark_bridge.cli.sources import StateLocation
from spark_bridge.cli.storage_options import Option, options_of
from spark_bridge.overview.formats import number, size
from spark_bridge.overview.model import to_plain

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Spark's checkpoint location of the query.")
]
VersionOption = Annotated[
    int | None, typer.Option(help="A version that is kept; version N+1 is the state after batch N.")
]


def files(
    checkpoint: CheckpointArgument,
    version: VersionOption = None,
    state_location: StateLocation = None,
    storage_option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Say of every file of the state at CHECKPOINT what it is, and what keeps it.

    With --version only the files that this version can be loaded from.

    Examples: statestore files ck/; statestore files s3://bucket/ck --version 12 --json
    """
    with errors_explained():
        place = find_state(checkpoint, state_location, options_of(storage_option))
        versions = StateVersions.look(place, passes_over_damage=True)
        found = stored_files(versions, version)
    show(lambda: to_plain(found), lambda: _files_view(found), as_json=as_json)
    for what in versions.damages.values():
        complain(what)
    if versions.damages:
        raise typer.Exit(DAMAGED)


def _files_view(found: list[StoredFile]) -> RenderableType:
    def kept(file: StoredFile) -> str:
        most = 3
        more = len(file.kept_by) - most
        return ", ".join(file.kept_by[:most]) + (f" and {more} more" if more > 0 else "") or file.why

    rows = ((f.path, f.kind, number(f.size), f.version, kept(f)) for f in found)
    sums: Counter[str] = Counter()
    for file in found:
        sums[file.kind] += file.size
    counts = Counter(file.kind for file in found)
    unneeded = [file for file in found if not file.kept_by]
    return Group(
        filled(rows, "path", "kind", "bytes", "version", "kept by"),
        filled(((k, number(counts[k]), size(sums[k])) for k in sorted(sums)), "kind", "files", "size", title="All"),
        Text(f"{len(unneeded)} files, {size(sum(f.size for f in unneeded))}, are kept by nothing."),
    )


def verify(
    checkpoint: CheckpointArgument,
    version: VersionOption = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Also load every partition, as a host would, and read all its rows.")
    ] = False,
    state_location: StateLocation = None,
    storage_option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Read every file from which a version of the state at CHECKPOINT can be loaded, and name the damage.

    By default the last completed version. The exit code is 1 if a file is damaged or missing, also where the version
    can still be loaded without it.

    Examples: statestore verify ck/; statestore verify ck/ --version 12 --rows --json
    """
    with errors_explained():
        place = find_state(checkpoint, state_location, options_of(storage_option))
        try:
            versions = StateVersions.look(place, passes_over_damage=True)
        except (DamagedFileError, MissingFileError) as error:
            # The newest manifest: without it, nobody can tell which files make a version.
            raise _unreadable(str(error), [], as_json) from error
        try:
            found = _verified(versions, version, rows, as_json)
        except (DamagedFileError, VersionNotFoundError) as error:
            if not versions.damages:
                raise
            raise _unreadable(str(error), [to_plain(d) for d in damages_of_manifests(versions)], as_json) from error
    show(lambda: {**to_plain(found), "is_sound": found.is_sound}, lambda: _verified_view(found), as_json=as_json)
    if not found.is_sound:
        raise typer.Exit(FOUND)


def _verified(versions: StateVersions, version: int | None, rows: bool, as_json: bool) -> Verification:
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        return verify_version(versions, version, reads_rows=rows)
    with console.status("Reading the files") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"Read {done} of {total} files")

        return verify_version(versions, version, reads_rows=rows, progress=progress)


def _unreadable(what: str, damages: list[Any], as_json: bool) -> typer.Exit:
    """Tell of a version that manifests hide, so that scripts find the damage where they look for others.

    Return the exception that ends the command.
    """
    unnamed = {"path": None, "operator": None, "partition": None, "version": None, "what": what}
    plain = {"version": None, "damages": damages or [unnamed], "is_sound": False, "error": what}
    show(lambda: plain, lambda: Text(what, "red"), as_json=as_json)
    return typer.Exit(FOUND)


def _verified_view(found: Verification) -> RenderableType:
    lines: list[Any] = [
        Text(d.what if d.partition is None else f"{d.operator}/{d.partition}, version {d.version}: {d.what}", "red")
        for d in found.damages
    ]
    read = f"Read {number(found.files)} files of version {found.version}, {size(found.nbytes)}"
    if found.rows is not None:
        read += f", {number(found.rows)} rows"
    if found.is_sound:
        lines.append(Text(f"{read}: all are as they were written."))
    elif found.lost:
        lines.append(
            Text(f"{read}. Version {found.version} cannot be loaded: {', '.join(found.lost)}.", style="bold red")
        )
    elif all(d.operator is None for d in found.damages):
        lines.append(
            Text(f"{read}: these are as they were written. Other versions or the query's start need what is damaged.")
        )
    else:
        lines.append(Text(f"{read}. Version {found.version} can still be loaded, by older snapshots and changelogs."))
    return Group(*lines)
