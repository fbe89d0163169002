"""The system that a command describes: a running cluster, or the checkpoint of a query without any cluster."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from backends.decoders import json_decoder
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.output import DAMAGED, FAILED, complain, errors_explained
from spark_bridge.exceptions import EnvironmentProblemError, RequestError, UnknownKeyOrNamespaceError
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import Overview
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import from_environment
from spark_bridge.queryable.client.json_values import from_json, key_of_json, key_of_text
from spark_bridge.queryable.client_connection import LOOPBACK
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from coordinator_actor.reference import RayCoordinatorPort
    from spark_bridge.overview.from_cluster import KnownCheckpoints

# Joining a Ray cluster for the time of one ``statestore`` command.


@contextmanager
def joined_ray(address: str | None, namespace: str) -> Iterator[None]:
    """Join the Ray cluster at ``address`` (None: the one that this machine has on record), and leave it at the end.

    Without an address, a note on stderr names the cluster if several run on this machine. Raises
    ``EnvironmentProblemError`` if no Ray cluster answers.
    """
    import ray

    from spark_bridge.session.ray_cluster import check_listens

    if address is not None:
        check_listens(address)
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise EnvironmentProblemError(
            f"No Ray cluster answers at {address or 'the address that this machine has on record'}; "
            f"name one with --address or RAY_ADDRESS. Ray says: {error}"
        ) from error
    try:
        if address is None:
            _note_other_clusters(ray.get_runtime_context().gcs_address)
        yield
    finally:
        ray.shutdown()


def _note_other_clusters(joined: str) -> None:
    """Say which cluster was joined, if several run on this machine: Ray's record names the one that started last."""
    from ray._private.services import find_gcs_addresses

    def is_same(address: str) -> bool:
        """Return whether it is the joined one: Ray may name a cluster of this machine by its loopback address."""
        (ip, _, port), (joined_ip, _, joined_port) = address.rpartition(":"), joined.rpartition(":")
        return port == joined_port and (ip == joined_ip or not {ip, joined_ip}.isdisjoint(LOOPBACK))

    others = sorted(address for address in find_gcs_addresses() if not is_same(address))
    if others:
        complain(
            f"Several Ray clusters run on this machine. This is the one at {joined}; others are at "
            f"{', '.join(others)}. Name one with --address or RAY_ADDRESS.",
            style=None,
        )


@contextmanager
def reachable_coordinator(
    address: str | None, namespace: str, coordinator: str, timeout: float
) -> Iterator[RayCoordinatorPort | None]:
    """Give the coordinator of the cluster at ``address``, or of the one on this machine; None if there is none.

    ``timeout`` is in seconds, for one message. Raises ``EnvironmentProblemError`` if no cluster answers at ``address``.
    """
    from spark_bridge.session.ray_cluster import running_ray

    ray_address = address or running_ray()
    if ray_address is None:
        yield None
        return
    import ray

    from coordinator_actor.reference import RayCoordinatorPort

    with joined_ray(ray_address, namespace):
        try:
            ray.get_actor(coordinator, namespace=namespace)
        except ValueError:
            yield None
            return
        yield RayCoordinatorPort(namespace, coordinator, timeout)


# The settings of storage, which the commands about stored files share.


Option = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="A storage setting, name=value; spark.hadoop.fs.s3a.* as in Spark. Repeatable. Every user of this machine "
        "can read it in the process list: leave secrets to the environment (AWS_SECRET_ACCESS_KEY and others).",
    ),
]


def options_of(assignments: list[str] | None) -> dict[str, str]:
    """Return the settings by name; raises ``typer.BadParameter`` for one without a value."""
    pairs = [one.partition("=") for one in assignments or ()]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} has no value; write name=value")
    return {name: value for name, _, value in pairs}


# The options of commands that ask hosts which use TLS.


TlsCa = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="STATESTORE_TLS_CA",
        help="The authorities of the hosts' certificates (PEM), if hosts use TLS.",
    ),
]
TlsCertificate = Annotated[
    str | None,
    typer.Option(
        "--tls-certificate",
        metavar="FILE",
        envvar="STATESTORE_TLS_CERTIFICATE",
        help="The certificate of this process, if hosts ask for one.",
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", envvar="STATESTORE_TLS_KEY", help="The key of that certificate."),
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        metavar="NAME",
        envvar="STATESTORE_TLS_SERVER_NAME",
        help="The name in the hosts' certificates, if these do not have their addresses.",
    ),
]


def tls_of(ca: str | None, certificate: str | None, key: str | None, server_name: str | None) -> TlsConf | None:
    """Return the settings of the options; None for no TLS.

    Raises ``typer.BadParameter`` for others without the authorities, and ``TlsError`` for a certificate or key alone.
    """
    if ca is None:
        options = {"--tls-certificate": certificate, "--tls-key": key, "--tls-server-name": server_name}
        if named := [option for option, value in options.items() if value is not None]:
            raise typer.BadParameter(
                f"{', '.join(named)} without the authorities of the hosts' certificates: give --tls-ca too."
            )
        return None
    return TlsConf(ca, certificate, key, server_name=server_name)


CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="LOCATION",
        help="Look at the checkpoint of a query there, in place of a cluster. The query may run or not.",
    ),
]
StateLocation = Annotated[
    str | None, typer.Option(help="The directory of spark.statestore.location, if the query has one.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", envvar="RAY_ADDRESS", help="The Ray cluster; default: the one on this machine."),
]
Namespace = Annotated[str, typer.Option("--namespace", help="The Ray namespace of the coordinator.")]
CoordinatorName = Annotated[str, typer.Option("--coordinator", help="The name of the coordinator.")]


@dataclass(frozen=True)
class Source:
    """A checkpoint if one is named, else a cluster. ``damages`` has the damage in storage that was skipped."""

    checkpoint: str | None = None
    state_location: str | None = None
    storage_options: tuple[str, ...] = ()
    address: str | None = None
    namespace: str = NAMESPACE
    coordinator: str = COORDINATOR_NAME
    tls: TlsConf | None = None
    damages: list[str] = field(default_factory=list)

    @functools.cached_property
    def known(self) -> KnownCheckpoints:
        """The checkpoints of the cluster that an earlier look has seen."""
        from spark_bridge.overview.from_cluster import KnownCheckpoints  # which imports Ray

        return KnownCheckpoints()

    @property
    def options(self) -> dict[str, str]:
        """Return the settings of storage; raises ``typer.BadParameter`` for one without a value."""
        return options_of(list(self.storage_options))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the Ray cluster, unless a checkpoint is read. Raises ``EnvironmentProblemError`` if none answers."""
        if self.checkpoint is not None:
            yield
            return
        with joined_ray(self.address, self.namespace):
            yield

    def overview(self) -> Overview:
        """Return the overview, within ``joined``. Raises as ``overview_of_checkpoint``, ``cluster_overview`` do."""
        if self.checkpoint is not None:
            overview = overview_of_checkpoint(self.checkpoint, self.state_location, self.options)
            self.damages[:] = [what for query in overview.queries for what in query.damages]
            return overview
        from spark_bridge.overview.from_cluster import cluster_overview

        return cluster_overview(self.namespace, self.coordinator, known=self.known)

    def looked_at(self) -> Overview:
        """Return the overview. Raises what ``joined`` and ``overview`` raise."""
        with self.joined():
            return self.overview()

    @contextmanager
    def client(self) -> Iterator[QueryableStateClient]:
        """Yield a query client of the checkpoint, savepoint or cluster.

        A cluster is asked without Ray if ``STATESTORE_ADDRESS`` and ``STATESTORE_TOKEN`` name a host and a token.
        """
        if self.checkpoint is not None:
            from spark_bridge.state_data.checkpoint_client import client_of_path

            where = (self.checkpoint, self.state_location, self.options)
            with client_of_path(*where, progress=complain, damaged=self.damages.append) as client:
                yield client
            return
        # With an address in the environment, the client does not ask the coordinator.
        in_ray = from_environment(None, None)[0] is None
        with (
            self.joined() if in_ray else nullcontext(),
            QueryableStateClient.connect(self.namespace, self.coordinator, tls=self.tls) as client,
        ):
            yield client


def _source(
    checkpoint: CheckpointOption = None,
    state_location: StateLocation = None,
    storage_option: Option = None,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_server_name: TlsServerName = None,
) -> Source:
    tls = tls_of(tls_ca, tls_certificate, tls_key, tls_server_name)
    return Source(checkpoint, state_location, tuple(storage_option or ()), address, namespace, coordinator, tls)


def with_source(command: Callable[..., None], has_tls: bool = False) -> Callable[..., None]:
    """Return a command whose parameter ``source`` is built from options of its command line."""
    # By signatures: on Python 3.10, get_type_hints hides the annotations that typer needs if the default is None.
    options = inspect.signature(_source, eval_str=True).parameters
    shared = {name: p for name, p in options.items() if has_tls or not name.startswith("tls_")}
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "source"]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        named = {name: arguments.pop(name) for name in shared}
        with errors_explained():
            source = _source(**named)
        code = 0
        try:
            command(source=source, **arguments)
        except typer.Exit as ended:
            code = ended.exit_code
        if source.damages and code != FAILED:  # else the error reports it
            for what in source.damages:
                complain(what)
            code = code or DAMAGED
        if code:
            raise typer.Exit(code)

    # A command's own options first, as its help shows them, and --json last among them.
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


with_state_source = functools.partial(with_source, has_tls=True)
"""That of a command that asks hosts for state, which may use TLS."""


# Keys and conditions as people type them on a command line.


_CONDITION = re.compile(
    r"\s*(?P<column>.+?)\s*(?:(?P<null>\bis(?:\s+not)?\s+null)|(?P<operator><=|>=|!=|<>|==?|<|>|\bin\b)\s*(?P<value>.+))",
    re.IGNORECASE | re.DOTALL,
)


def key_of_words(words: Sequence[str], schema: pa.Schema) -> Any:
    """Return the key that the words of a command line name.

    It is written as ``column=value`` for each column of the key; or as JSON, an object or an array; or as the values in
    the order of the columns, one a word, or in one word with commas between (as in CSV). Raises
    ``UnknownKeyOrNamespaceError``.
    """
    named = _by_name(words, schema)
    if named is not None:
        return named
    if len(words) == 1:
        value = _json(words[0])
        nested = isinstance(value, dict | list)
        if nested and not (len(schema) == 1 and pa.types.is_string(schema.types[0]) and isinstance(value, dict)):
            return key_of_json(value, schema)
        if value is None and words[0] == "null" and not pa.types.is_string(schema.types[0]):
            return key_of_json(value, schema)
        return key_of_text(words[0], schema)
    if len(words) != len(schema):
        wanted = ", ".join(f"{f.name}: {f.type}" for f in schema)
        raise UnknownKeyOrNamespaceError(
            f"{len(words)} values were given; the key has {len(schema)} columns ({wanted}). Write column=value for "
            "each, or JSON."
        )
    return tuple(_value(word, field) for word, field in zip(words, schema, strict=True))


def _by_name(words: Sequence[str], schema: pa.Schema) -> Any:
    """Return the key if every word is column=value of a column of the key; None if the words are something else."""
    pairs = [word.partition("=") for word in words]
    if len(words) != len(schema) or {name for name, _, _ in pairs} != set(schema.names):
        return None
    texts = {name: value for name, _, value in pairs}
    values = [_value(texts[field.name], field) for field in schema]
    return values[0] if len(values) == 1 else tuple(values)


def _value(text: str, field: pa.Field) -> Any:
    """Return a value of a column; ``null`` is null, except in string columns, and nested values are JSON."""
    if text == "null" and not pa.types.is_string(field.type):
        return None
    value = _json(text) if pa.types.is_nested(field.type) else text
    return from_json(value, field.type, f"Key column {field.name!r}")


def bound_of(text: str | None) -> Any:
    """Return a bound of a scan from JSON, or from plain text. None means no bound."""
    value = None if text is None else _json(text)
    return text if value is None else value


def condition_of(text: str) -> tuple[Any, ...]:
    """Return a condition as ``client.scan`` takes it, of text such as ``n > 10``, ``k in ["a", "b"]``, ``v is null``.

    A value is JSON, or plain text. Raises ``RequestError``.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise RequestError(f"{text!r} is not a condition; write a column, an operator and a value, such as 'n > 10'.")
    if match["null"]:
        return match["column"], " ".join(match["null"].lower().split())
    operator, written = match["operator"].lower(), match["value"].strip()
    value = _json(written)
    if operator == "in" and not isinstance(value, list):
        raise RequestError(f"{text!r}: after 'in' comes a JSON array, such as [1, 2].")
    return match["column"], operator, written if value is None else value


def _json(text: str) -> Any:
    """Return the value of a JSON string; None if it is not JSON."""
    try:
        return json_decoder(Any).decode(text.encode())
    except ValueError:  # plain text
        return None
