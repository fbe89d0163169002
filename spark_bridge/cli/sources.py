"""The system that a command describes: a running cluster, or the checkpoint of a query without any cluster.

The options that say so are the same for all commands that look. A command takes a ``Source``, and ``with_source`` gives
its command line these options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import DAMAGED, FAILED, complain, errors_explained
from spark_bridge.cli.storage_options import Option, options_of
from spark_bridge.cli.tls_options import TlsCa, TlsCertificate, TlsKey, TlsServerName, tls_of
from spark_bridge.overview.from_cluster import KnownCheckpoints
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import Overview
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.cluster.discovery import from_environment
from spark_bridge.transport.tls import TlsConf

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
    """A checkpoint if one is named, else a cluster. ``tls`` is how its hosts are asked.

    ``damages`` says what was found damaged in storage and was passed over; ``known`` is what the last look has made.
    """

    checkpoint: str | None = None
    state_location: str | None = None
    storage_options: tuple[str, ...] = ()
    address: str | None = None
    namespace: str = NAMESPACE
    coordinator: str = COORDINATOR_NAME
    tls: TlsConf | None = None
    damages: list[str] = field(default_factory=list)
    known: KnownCheckpoints = field(default_factory=KnownCheckpoints)

    @property
    def options(self) -> dict[str, str]:
        """Return the settings of storage; raises ``typer.BadParameter`` for one without a value."""
        return options_of(list(self.storage_options))

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be in the cluster, if a cluster is looked at. Raises ``EnvironmentProblemError`` if none answers."""
        if self.checkpoint is not None:
            yield
            return
        with joined_ray(self.address, self.namespace):
            yield

    def overview(self) -> Overview:
        """Return the overview as it is now, within ``joined``.

        Raises what ``overview_of_checkpoint`` and ``cluster_overview`` raise.
        """
        if self.checkpoint is not None:
            found = overview_of_checkpoint(self.checkpoint, self.state_location, self.options)
            self.damages[:] = [what for query in found.queries for what in query.damages]
            return found
        from spark_bridge.overview.on_ray import cluster_overview

        return cluster_overview(self.namespace, self.coordinator, known=self.known)

    def looked_at(self) -> Overview:
        """Return the overview. Raises what ``joined`` and ``overview`` raise."""
        with self.joined():
            return self.overview()

    @contextmanager
    def client(self) -> Iterator[QueryableStateClient]:
        """Give a query client of the checkpoint, savepoint or cluster.

        A cluster is asked without Ray if ``STATESTORE_ADDRESS`` and ``STATESTORE_TOKEN`` name a host and a token.
        """
        with ExitStack() as held:
            yield held.enter_context(self._opened(held))

    def _opened(self, held: ExitStack) -> QueryableStateClient:
        if self.checkpoint is not None:
            from spark_bridge.state_data.savepoint_client import client_of_path

            where = (self.checkpoint, self.state_location, self.options)
            return held.enter_context(client_of_path(*where, progress=complain, damaged=self.damages.append))
        if from_environment(None, None)[0] is not None:
            return QueryableStateClient.connect(tls=self.tls)
        held.enter_context(joined_ray(self.address, self.namespace))
        return QueryableStateClient.connect(self.namespace, self.coordinator, tls=self.tls)


def _source(
    checkpoint: CheckpointOption = None,
    state_location: StateLocation = None,
    storage_option: Option = None,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
) -> Source:
    return Source(checkpoint, state_location, tuple(storage_option or ()), address, namespace, coordinator)


def _source_of_state(
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
    source = _source(checkpoint, state_location, storage_option, address, namespace, coordinator)
    return replace(source, tls=tls_of(tls_ca, tls_certificate, tls_key, tls_server_name))


def with_source(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameter ``source`` is made of options of its command line."""
    return _with(_source, command)


def with_state_source(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as ``with_source`` does, of one that asks hosts for state, which may use TLS."""
    return _with(_source_of_state, command)


def _with(make: Callable[..., Source], command: Callable[..., None]) -> Callable[..., None]:
    # By signatures: on Python 3.10, get_type_hints hides what typer looks for wherever the default is None.
    shared = inspect.signature(make, eval_str=True).parameters
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "source"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        named = {name: given.pop(name) for name in shared}
        with errors_explained():
            source = make(**named)
        code = 0
        try:
            command(source=source, **given)
        except typer.Exit as ended:
            code = ended.exit_code
        if source.damages and code != FAILED:  # else the error says so
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
