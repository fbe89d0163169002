"""``statestore get``, ``scan``, ``sql`` ...: state of a running query, a checkpoint or a savepoint, and of Spark's."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from coordinator_actor.exceptions import listed_names
from spark_bridge.cli import output, sources
from spark_bridge.exceptions import QueryEndedError, RequestError
from spark_bridge.queryable.client.json_values import at_of_text, bound_of_json, rows_to_json, to_json, window_of_text
from spark_bridge.queryable.client.kafka_sink import KafkaSink
from spark_bridge.queryable.sql.sql import SqlLimits, import_duckdb, is_out_of_memory
from spark_bridge.state_format.stored_rows import AFTER, BEFORE, CHANGE_TYPE

OperatorArgument = Annotated[str, typer.Argument(metavar="OPERATOR", help="The name of the operator.")]
QueryName = Annotated[
    str | None, typer.Option("--query", help="Name, query id or run id, if several queries have such an operator.")
]
StateName = Annotated[str | None, typer.Option("--state", help="The state variable, if the operator has several.")]
AtVersion = Annotated[
    int | None, typer.Option("--version", min=0, help="A version that is kept; default: the last completed one.")
]
AtTime = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="TIME",
        help="The time that rolling aggregates are of, in ISO 8601, in UTC without a zone; default: now. 'watermark': "
        "that of the last completed version.",
    ),
]
FormOption = Annotated[output.PrintedForm, typer.Option("--format", help="How rows are printed.")]
KEY_HELP = "column=value for each column; or the values in order; or JSON."


@sources.with_state_source
def get(
    source: sources.Source,
    operator: OperatorArgument,
    key: Annotated[list[str], typer.Argument(metavar="KEY...", help=KEY_HELP)],
    window: Annotated[
        str | None, typer.Option(help="The start of the key's window, or start/end, in ISO 8601.")
    ] = None,
    version: AtVersion = None,
    at: AtTime = None,
    state: StateName = None,
    query: QueryName = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the state of one key. The exit code is 1 if it has none.

    Examples: statestore get user_totals 42; statestore get by_country country=de user=42 --version 17;
    statestore get by_country '["de", 42]' --checkpoint ck/ --json
    """
    with output.errors_explained(), source.client() as client:
        asked = sources.key_of_words(key, client.key_schema(operator, query, state))
        wanted = None if window is None else window_of_text(window)
        values = client.get(operator, asked, query, state, window=wanted, version=version, at=_time(at))
        of_time = {} if client.answered_at is None else {"at": to_json(client.answered_at)}
    value = to_json(values)
    if as_json:
        typer.echo(output.json_line({"operator": operator, "key": to_json(asked), "value": value, **of_time}))
    elif values is None:
        output.complain(f"Operator {operator} has nothing for this key.")
    else:
        for line in _lines(value):
            output.line(line)
        _say_time(of_time.values())
    if values is None:
        raise typer.Exit(output.FOUND)


def _time(at: str | None) -> Any:
    return None if at is None else at_of_text(at)


def _say_time(times: Iterable[str]) -> None:
    """Say on stderr what time the rolling aggregates are of, if there are any."""
    for time in sorted(set(times)):
        output.complain(f"Rolling aggregates are as of {time}.")


def _lines(value: Any) -> list[str]:
    """Return a value for people: a line per column of a row, or per row."""
    if isinstance(value, dict):
        return [f"{name}: {output.cell(one)}" for name, one in value.items()]
    return [output.cell(one) for one in value] if isinstance(value, list) else [output.cell(value)]


@sources.with_state_source
def scan(
    source: sources.Source,
    operator: OperatorArgument,
    where: Annotated[
        list[str] | None, typer.Option(help="A condition, such as 'n > 10'. Repeatable: all must hold.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Keys that begin so: JSON array of columns, or text.")] = None,
    start: Annotated[str | None, typer.Option(help="Keys from here on: JSON, or text.")] = None,
    end: Annotated[str | None, typer.Option(help="Keys before this: JSON, or text.")] = None,
    columns: Annotated[str | None, typer.Option(help="The wanted columns, with commas between.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="The most rows; 0 for all.")] = 100,
    version: AtVersion = None,
    at: AtTime = None,
    state: StateName = None,
    query: QueryName = None,
    form: FormOption = output.PrintedForm.table,
    as_json: output.AsJson = False,
) -> None:
    """Show the rows of an operator's state: one per key, list element, map entry, window, session or timer.

    Examples: statestore scan user_totals --where 'n > 10' --columns user,n; statestore scan user_totals --limit 0
    --format csv --checkpoint s3://bucket/ck; statestore scan by_country --prefix '["de"]' --json
    """
    with output.errors_explained(), source.client() as client:
        schema = client.key_schema(operator, query, state)
        bounds = {
            name: bound_of_json(sources.bound_of(text), schema, f"--{name}")
            for name, text in (("prefix", prefix), ("start", start), ("end", end))
        }
        rows = client.scan(
            operator,
            state,
            # One row more, to know whether there are more.
            limit=limit + 1 if limit else None,
            columns=None if columns is None else [name.strip() for name in columns.split(",")],
            where=[sources.condition_of(one) for one in where or ()],
            query=query,
            version=version,
            at=_time(at),
            **bounds,
        )
        with rows:
            shown = _Limited(limit)
            of_time = {} if rows.at is None else {"at": to_json(rows.at)}
            about = {"operator": operator, "version": rows.version, **of_time}
            output.print_rows(rows.schema, map(shown.of, rows), output.PrintedForm.json if as_json else form, about)
    _say_time(() if as_json or form is output.PrintedForm.json else of_time.values())
    if shown.is_cut:
        output.complain(f"There are more than {limit} rows; --limit 0 shows all.")


class _Limited:
    """The first rows of batches; ``is_cut`` says whether there were more. 0 means no limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._given = 0
        self.is_cut = False

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        remaining = self._limit - self._given
        self.is_cut = bool(self._limit) and batch.num_rows > remaining
        rows = batch.slice(0, remaining) if self._limit else batch
        self._given += rows.num_rows
        return rows


@sources.with_state_source
def sql(
    source: sources.Source,
    statement: Annotated[str, typer.Argument(metavar="STATEMENT", help="One statement that reads; - reads stdin.")],
    version: AtVersion = None,
    at: AtTime = None,
    form: FormOption = output.PrintedForm.table,
    as_json: output.AsJson = False,
    sql_memory: Annotated[
        int, typer.Option(min=16, metavar="MIB", help="Memory of the statement; beyond it, 8 GiB of temporary files.")
    ] = SqlLimits().memory_bytes >> 20,
) -> None:
    """Run SQL over the state; the tables are the operators. It needs the package duckdb.

    Examples: statestore sql 'select user, spent from user_totals order by spent desc limit 10';
    statestore sql 'select count(*) from user_totals' --checkpoint ck/ --version 80; statestore sql - --json < q.sql
    """
    text = sys.stdin.read() if statement == "-" else statement
    limits = SqlLimits(memory_bytes=sql_memory << 20)
    with output.errors_explained(), _sql_explained(limits), source.client() as client:
        result = client.sql(text, version=version, at=_time(at), limits=limits)
        reader = result.to_arrow_reader()
        output.print_rows(reader.schema, reader, output.PrintedForm.json if as_json else form)
        _say_time(map(to_json, result.times.values()))


@contextmanager
def _sql_explained(limits: SqlLimits) -> Iterator[None]:
    """Raise ``RequestError`` for refused statements, and ``EnvironmentProblemError`` without DuckDB."""
    duckdb = import_duckdb()
    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        if is_out_of_memory(error):
            raise limits.exceeded(error) from error
        raise RequestError(str(error)) from error


# ``statestore watch`` and ``diff``: the changes of each version, live, or the differences of two versions.


CHANGE_WORDS = {"insert": "added", "update": "changed", "delete": "removed"}


@sources.with_state_source
def watch(
    source: sources.Source,
    operator: OperatorArgument,
    key: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help=KEY_HELP)] = None,
    from_version: Annotated[
        int | None, typer.Option(min=0, help="Begin with the changes after this version; default: with the next ones.")
    ] = None,
    changes: Annotated[int | None, typer.Option(min=1, help="End after this many changed rows.")] = None,
    wait: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a query may be down, for a restart, until the watch ends.")
    ] = 30.0,
    state: StateName = None,
    query: QueryName = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the changes of each completed version to a key or to all keys, until Ctrl-C or the end of the query.

    With --json there is one JSON object a line. A checkpoint is read every second; it does not show when its query
    has ended.

    Examples: statestore watch user_totals 42; statestore watch user_totals --from-version 17 --json;
    statestore watch user_totals user=42 --changes 1 --checkpoint ck/
    """
    with output.errors_explained(), source.client() as client:
        keys = None if not key else [sources.key_of_words(key, client.key_schema(operator, query, state))]
        try:
            watched = client.watch(operator, keys, state=state, query=query, from_version=from_version, timeout=wait)
            with closing(watched), suppress(KeyboardInterrupt):
                rows = (row for change in watched for row in rows_to_json(change.batch))
                for number, row in enumerate(rows, 1):
                    typer.echo(output.json_line(row) if as_json else output.visible(_line(row)))
                    if number == changes:
                        break
        except QueryEndedError as ended:
            output.complain(str(ended))


class OnGap(str, Enum):
    """The choices of a writer if the next changes are gone."""

    stop = "stop"
    resend = "resend"


@sources.with_state_source
def changes_to_kafka(
    source: sources.Source,
    operator: OperatorArgument,
    to_kafka: Annotated[str, typer.Option("--to-kafka", metavar="TOPIC", help="The topic; it has no other writer.")],
    bootstrap: Annotated[str, typer.Option(metavar="HOST:PORT[,...]", help="Brokers of the Kafka cluster.")],
    kafka_config: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, exists=True, help="Settings of librdkafka, a line name=value each, such as sasl.password."
        ),
    ] = None,
    on_gap: Annotated[
        OnGap, typer.Option(help="If the next changes are gone: end with an error, or write the whole state again.")
    ] = OnGap.stop,
    resend: Annotated[
        bool, typer.Option("--resend", help="Write the whole state first, with tombstones for keys that are gone.")
    ] = False,
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds that the query or the brokers may be away.")] = 300.0,
    state: StateName = None,
    query: QueryName = None,
) -> None:
    """Write the state of an operator, and then the changes of each completed version, to a topic of Kafka.

    It runs until Ctrl-C or the end of the query, and continues where it was when it is started again. Needs the package
    confluent-kafka.

    Example: statestore changes user_totals --to-kafka user-totals --bootstrap broker:9092
    """
    with output.errors_explained(), source.client() as client:
        sink = KafkaSink(
            client,
            operator,
            topic=to_kafka,
            bootstrap=bootstrap,
            query=query,
            state=state,
            config={} if kafka_config is None else _settings(kafka_config),
            on_gap=on_gap.value,
            resend=resend,
            timeout=wait,
            progress=lambda line: output.complain(line, None),
        )
        with suppress(KeyboardInterrupt):
            sink.run()


def _settings(file: Path) -> dict[str, str]:
    """Return the settings of a file with a line name=value each. Raises ``RequestError`` for another line."""
    settings = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        name, sign, value = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not sign:
            raise RequestError(f"Line {number} of {file} must be name=value, as in security.protocol=SASL_SSL.")
        settings[name.strip()] = value.strip()
    return settings


def _line(row: dict[str, Any]) -> str:
    """Return one change for people: its version, the key, and the columns that are other than before."""
    version, kind = row.pop("version"), row.pop(CHANGE_TYPE)
    before, after = row.pop(BEFORE, None), row.pop(AFTER, None)
    key = " ".join(f"{name}={output.cell(value)}" for name, value in row.items())
    if before is None or after is None:
        values = [f"{name}: {output.cell(value)}" for name, value in (after or before or {}).items()]
    else:
        values = [
            f"{name}: {output.cell(old)} -> {output.cell(after[name])}"
            for name, old in before.items()
            if old != after[name]
        ]
    return f"version {version}  {CHANGE_WORDS[kind]}  {key}  {', '.join(values)}".rstrip()


@sources.with_state_source
def diff(
    source: sources.Source,
    operator: OperatorArgument,
    first: Annotated[int, typer.Argument(metavar="V1", min=0, help="The earlier version.")],
    last: Annotated[int | None, typer.Argument(metavar="[V2]", min=0, help="Default: the last completed one.")] = None,
    state: StateName = None,
    query: QueryName = None,
    summary: Annotated[bool, typer.Option("--summary", help="Count only.")] = False,
    form: FormOption = output.PrintedForm.table,
    as_json: output.AsJson = False,
) -> None:
    """Show the keys that were added, removed or changed from version V1 to V2. The exit code is 1 if there are any.

    Version N+1 is the state after batch N. Both versions are read, one batch of rows at a time.

    Examples: statestore diff user_totals 17 18; statestore diff user_totals 17 --summary --json;
    statestore diff user_totals 17 18 --checkpoint ck/ --format csv
    """
    with (
        output.errors_explained(),
        source.client() as client,
        client.diff(operator, first, last, state=state, query=query) as rows,
    ):
        counts = Counter(dict.fromkeys(CHANGE_WORDS.values(), 0))

        def counted() -> Iterator[pa.RecordBatch]:
            for batch in rows:
                words = [CHANGE_WORDS[kind] for kind in batch.column(0).to_pylist()]
                counts.update(words)
                yield batch.set_column(0, CHANGE_TYPE, pa.array(words, pa.string()))

        about = {"operator": operator, "from_version": rows.from_version, "to_version": rows.to_version}
        if summary:
            for _ in counted():
                pass
            if as_json:
                typer.echo(output.json_line({**about, **counts}))
        else:
            output.print_rows(rows.schema, counted(), output.PrintedForm.json if as_json else form, about)
    if not as_json:
        totals_text = ", ".join(f"{n:,} {kind}" for kind, n in counts.items())
        text = f"Keys of {operator} from version {about['from_version']} to {about['to_version']}: {totals_text}"
        if form is output.PrintedForm.table:
            output.printer().print(text, markup=False, highlight=False)
        else:
            output.complain(text)
    if any(counts.values()):
        raise typer.Exit(output.FOUND)


# ``statestore take-over``: the state of a stopped query of Spark, for a query of this project.


def take_over_query(
    spark_checkpoint: Annotated[
        str, typer.Argument(metavar="SPARK_CHECKPOINT", help="The checkpoint location of the stopped query of Spark.")
    ],
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The new location; it must be empty.")],
    program: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="The function that takes a SparkSession and returns the new query's stream."
        ),
    ],
    operator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Which operator of Spark an operator takes over. Repeatable."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATOR.COLUMN=SOURCE", help="Spark's name of a column, or the place of a buffer. Repeatable."
        ),
    ] = None,
    file_sink: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help="The directory of the old query's file sink, if the new one keeps it."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Convert everything, show samples, write nothing.")
    ] = False,
    state_location: Annotated[
        str | None, typer.Option(help="Where new state goes; default: spark.statestore.location, or CHECKPOINT.")
    ] = None,
    storage_option: sources.Option = None,
    as_json: output.AsJson = False,
) -> None:
    """Make the new CHECKPOINT, from which the query of MODULE:FUNCTION continues a stopped query of Spark.

    Needs Spark 4 here, and runs on a local Spark and Ray, or on those of the environment (spark-submit, RAY_ADDRESS).

    Example: statestore take-over s3a://bucket/old s3://bucket/new my_job:totals --dry-run
    """
    import ray
    from pyspark.sql import SparkSession

    from spark_bridge.state_surgery.declared_operators import declared
    from spark_bridge.state_surgery.take_over import take_over

    with output.errors_explained():
        numbers = _operator_numbers(operator or [])
        pairs = _columns_of_options(column or [])
        make_stream = _function_at(program)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers of a local Spark import this package too
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false", "spark.ui.enabled": "false"}
    spark = SparkSession.builder.appName("statestore take-over").config(map=quiet).getOrCreate()
    if not ray.is_initialized():
        ray.init(logging_level="ERROR", log_to_driver=False)
    with output.errors_explained():
        stream = make_stream(spark)
        columns = _columns_by_operator(pairs, declared(stream))
        report = take_over(
            spark_checkpoint,
            checkpoint,
            stream,
            operators=numbers or None,
            columns=columns,
            file_sink=file_sink,
            dry_run=dry_run,
            state_location=state_location,
            storage_options=sources.options_of(storage_option),
            progress=output.steps_printed(as_json=as_json),
        )
    if as_json:
        by_name = {f"{owner}/{variable}": rows for (owner, variable), rows in report.rows_written.items()}
        facts = {"checkpoint": report.checkpoint_location, "query_id": report.query_id, "batch_id": report.batch_id}
        typer.echo(output.json_line({**facts, "rows_written": by_name, "dry_run": dry_run}))
        return
    for (owner, variable), rows in report.rows_written.items():
        output.printer().print(f"{owner}/{variable}: {rows:,} rows", highlight=False)
        if dry_run and (sample := report.samples_after.get((owner, variable))) is not None:
            output.print_rows(sample.schema, iter(sample.to_batches()), output.PrintedForm.table)
    begins = f"the query begins with batch {(report.batch_id or 0) + 1}"
    done = f"{report.checkpoint_location} is ready: {begins}. Do not start the old query again."
    text = f"Nothing was written. After take-over, {begins}." if dry_run else done
    output.printer().print(text, soft_wrap=True, highlight=False)


def _operator_numbers(pairs: list[str]) -> dict[str, int]:
    """Return numbers of Spark's operators by name. Raises ``RequestError`` for an option of another form."""
    numbers = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        if not name or not number.isdigit():
            raise RequestError(f"--operator {pair} must be NAME=NUMBER, as in user_totals=0.")
        numbers[name] = int(number)
    return numbers


def _columns_of_options(options: list[str]) -> list[tuple[str, str]]:
    """Return operator and column, and the source, of each ``--column``. Raises ``RequestError`` for another form."""
    pairs = []
    for option in options:
        target, _, source = option.partition("=")
        if not (all(target.partition(".")) and source):
            raise RequestError(f"--column {option} must be OPERATOR.COLUMN=SOURCE, as in user_totals.spent=2.")
        pairs.append((target, source))
    return pairs


def _columns_by_operator(pairs: list[tuple[str, str]], operators: Collection[str]) -> dict[str, dict[str, str | int]]:
    """Return what ``--column`` says, by operator and column: the names of both may have dots.

    Raises ``RequestError`` for a target that begins with no operator of the program.
    """
    columns: dict[str, dict[str, str | int]] = {}
    for target, source in pairs:
        operator = max((name for name in operators if target.startswith(f"{name}.")), key=len, default=None)
        if operator is None:
            raise RequestError(
                f"--column {target}={source} begins with no operator of the program. Its operators: "
                f"{listed_names(target.partition('.')[0], operators)}"
            )
        column = target[len(operator) + 1 :]
        columns.setdefault(operator, {})[column] = int(source) if source.isdigit() else source
    return columns


def _function_at(program: str) -> Any:
    """Return the function that ``MODULE:FUNCTION`` names. Raises ``RequestError`` if there is none."""
    module, _, name = program.partition(":")
    sys.path.insert(0, "")  # the directory of the user's program
    try:
        function = getattr(import_module(module), name, None) if name else None
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        function = None
    if not callable(function):
        raise RequestError(
            f"{program} must be MODULE:FUNCTION, a function in a module that Python finds from here, which takes a "
            "SparkSession and returns the streaming DataFrame of the new query."
        )
    return function
