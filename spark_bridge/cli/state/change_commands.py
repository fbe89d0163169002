"""``statestore watch`` and ``diff``: the changes of each version, live, or the differences of two versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_bridge.cli.keys import key_of_words
from spark_bridge.cli.output import FOUND, AsJson, complain, errors_explained, json_line, printer
from spark_bridge.cli.rows import PrintedForm, cell, print_rows
from spark_bridge.cli.sources import Source, with_state_source
from spark_bridge.cli.state.state_commands import KEY_HELP, FormOption, OperatorArgument, QueryName, StateName
from spark_bridge.exceptions import QueryEndedError
from spark_bridge.queryable.client.answers.json_values import rows_to_json
from spark_bridge.state_format.changed_rows import AFTER, BEFORE, CHANGE_TYPE

CHANGE_WORDS = {"insert": "added", "update": "changed", "delete": "removed"}


@with_state_source
def watch(
    source: Source,
    operator: OperatorArgument,
    key: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help=KEY_HELP)] = None,
    from_version: Annotated[
        int | None, typer.Option(min=0, help="Begin with the changes after this version; default: with the next ones.")
    ] = None,
    changes: Annotated[int | None, typer.Option(min=1, help="End after this many changed rows.")] = None,
    wait: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a query may be gone, for a restart, until the watch ends.")
    ] = 30.0,
    state: StateName = None,
    query: QueryName = None,
    as_json: AsJson = False,
) -> None:
    """Show what each completed version changes of a key or of all keys, until Ctrl-C or the end of the query.

    With --json there is one JSON object a line. A checkpoint is looked at every second; it does not say when its query
    has ended.

    Examples: statestore watch user_totals 42; statestore watch user_totals --from-version 17 --json;
    statestore watch user_totals user=42 --changes 1 --checkpoint ck/
    """
    with errors_explained(), source.client() as client:
        given = None if not key else [key_of_words(key, client.key_schema(operator, query, state))]
        try:
            watched = client.watch(operator, given, state=state, query=query, from_version=from_version, timeout=wait)
            with closing(watched), suppress(KeyboardInterrupt):
                for number, row in enumerate(_changed(watched), 1):
                    typer.echo(json_line(row) if as_json else _line(row))
                    if number == changes:
                        break
        except QueryEndedError as ended:
            complain(str(ended))


def _changed(watched: Any) -> Iterator[dict[str, Any]]:
    for change in watched:
        yield from rows_to_json(change.batch)


def _line(row: dict[str, Any]) -> str:
    """Return one change for people: its version, the key, and the columns that are other than before."""
    version, kind = row.pop("version"), row.pop(CHANGE_TYPE)
    before, after = row.pop(BEFORE, None), row.pop(AFTER, None)
    key = " ".join(f"{name}={cell(value)}" for name, value in row.items())
    if before is None or after is None:
        values = [f"{name}: {cell(value)}" for name, value in (after or before or {}).items()]
    else:
        values = [f"{name}: {cell(old)} -> {cell(after[name])}" for name, old in before.items() if old != after[name]]
    return f"version {version}  {CHANGE_WORDS[kind]}  {key}  {', '.join(values)}".rstrip()


@with_state_source
def diff(
    source: Source,
    operator: OperatorArgument,
    first: Annotated[int, typer.Argument(metavar="V1", min=0, help="The earlier version.")],
    last: Annotated[int | None, typer.Argument(metavar="[V2]", min=0, help="Default: the last completed one.")] = None,
    state: StateName = None,
    query: QueryName = None,
    summary: Annotated[bool, typer.Option("--summary", help="Count only.")] = False,
    form: FormOption = PrintedForm.table,
    as_json: AsJson = False,
) -> None:
    """Show the keys that were added, removed or changed from version V1 to V2. The exit code is 1 if there are any.

    Version N+1 is the state after batch N. Both versions are read, one batch of rows at a time.

    Examples: statestore diff user_totals 17 18; statestore diff user_totals 17 --summary --json;
    statestore diff user_totals 17 18 --checkpoint ck/ --format csv
    """
    with (
        errors_explained(),
        source.client() as client,
        client.diff(operator, first, last, state=state, query=query) as rows,
    ):
        counts = dict.fromkeys(CHANGE_WORDS.values(), 0)

        def counted() -> Iterator[pa.RecordBatch]:
            for batch in rows:
                kinds = pa.array([CHANGE_WORDS[kind] for kind in batch.column(0).to_pylist()], pa.string())
                for kind in CHANGE_WORDS.values():
                    counts[kind] += sum(one == kind for one in kinds.to_pylist())
                yield batch.set_column(0, CHANGE_TYPE, kinds)

        about = {"operator": operator, "from_version": rows.from_version, "to_version": rows.to_version}
        if summary:
            for _ in counted():
                pass
            if as_json:
                typer.echo(json_line({**about, **counts}))
        else:
            print_rows(rows.schema, counted(), PrintedForm.json if as_json else form, about)
    if not as_json:
        told = ", ".join(f"{n:,} {kind}" for kind, n in counts.items())
        text = f"Keys of {operator} from version {about['from_version']} to {about['to_version']}: {told}"
        if form is PrintedForm.table:
            printer().print(text, markup=False, highlight=False)
        else:
            complain(text)
    if any(counts.values()):
        raise typer.Exit(FOUND)
