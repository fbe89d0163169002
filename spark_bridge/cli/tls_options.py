"""The options of commands that ask hosts which use TLS."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_bridge.transport.tls import TlsConf

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
        given = {"--tls-certificate": certificate, "--tls-key": key, "--tls-server-name": server_name}
        if named := [option for option, value in given.items() if value is not None]:
            raise typer.BadParameter(
                f"{', '.join(named)} without the authorities of the hosts' certificates: give --tls-ca too."
            )
        return None
    return TlsConf(ca, certificate, key, server_name=server_name)
