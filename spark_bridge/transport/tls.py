"""TLS of the query port and of Flight: paths of certificates, the SSL contexts made of them, and errors with remedies.

Only paths are sent, in Spark's local properties and to Ray actors. Keys are read where they are used.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backends.decoders import json_decoder
from spark_bridge.exceptions import TlsError

_RAY = {"ca": "RAY_TLS_CA_CERT", "certificate": "RAY_TLS_SERVER_CERT", "key": "RAY_TLS_SERVER_KEY"}
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")


@dataclass(frozen=True)
class TlsConf:
    """The paths of the certificates (PEM). Hosts, tasks and the driver need all files, at the same paths on every node.

    ``ca`` has the authorities that certificates must be signed by. Hosts show ``certificate``, whose private key is in
    ``key``; it must name their IP addresses, or else the ``server_name`` that clients are to check it against. With
    ``client_auth`` hosts answer only clients that have a certificate too (mutual TLS). A client outside the cluster
    needs ``ca`` alone, unless it must have a certificate.
    """

    ca: str
    certificate: str | None = None
    key: str | None = None
    client_auth: bool = False
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            if path is not None:
                # Tasks and actors have other working directories.
                object.__setattr__(self, name, str(Path(os.fspath(path)).expanduser().absolute()))
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise TlsError(f"TlsConf has no {missing}=: certificate= and key= belong together.")

    @classmethod
    def from_ray_environment(cls, server_name: str | None = None) -> TlsConf:
        """Return the files that Ray itself is set to use (``RAY_USE_TLS=1``); clients need a certificate, as in Ray.

        Raises ``TlsError`` naming the variables that are not set.
        """
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            raise TlsError(
                "Ray does not use TLS here: RAY_USE_TLS is not 1. Set Ray's variables, or give TlsConf paths."
            )
        missing = [variable for variable in _RAY.values() if not os.environ.get(variable)]
        if missing:
            raise TlsError(f"RAY_USE_TLS is set, but {', '.join(missing)} not.")
        paths = {name: os.environ[variable] for name, variable in _RAY.items()}
        return cls(**paths, client_auth=True, server_name=server_name)

    def to_json(self) -> str:
        """Return the paths (not the keys) as JSON, for a Spark property."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> TlsConf:
        """Return the ``TlsConf`` of the JSON that ``to_json`` gave."""
        return json_decoder(cls).decode(text)

    def check(self) -> None:
        """Raise ``TlsError`` unless a host with these files and a client with them would accept each other.

        Only a connection to a host shows whether the certificate names that host's address.
        """
        server, client = self.server_context(), self.client_context()
        if self.server_name is None:
            client.check_hostname = False
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [server.wrap_bio(to_server, to_client, server_side=True), client.wrap_bio(to_client, to_server)]
        waiting = 0
        while waiting < len(sides):
            waiting = 0
            for side in sides:
                try:
                    side.do_handshake()
                    waiting += 1
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as error:
                    raise TlsError(
                        f"A host and a client with these certificates would not accept each other: {error}. "
                        f"Is {self.certificate} valid, and signed by an authority in {self.ca}?"
                    ) from error

    def server_context(self) -> ssl.SSLContext:
        """Return the SSL context of a server's sockets. Raises ``TlsError`` naming a file that is missing or wrong."""
        if self.certificate is None:
            raise TlsError("A host needs a certificate to use TLS: give TlsConf certificate= and key=.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load_certificate(context)
        if self.client_auth:
            context.verify_mode = ssl.CERT_REQUIRED
            self._load_ca(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return that of a client, which checks the host's certificate. Raises as ``server_context`` does."""
        context = _ClientContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.server_name = self.server_name
        self._load_ca(context)
        if self.certificate is not None:
            self._load_certificate(context)
        return context

    def flight_server_arguments(self) -> dict[str, Any]:
        """Return arguments for ``pyarrow.flight.FlightServerBase``. Raises ``TlsError``."""
        if self.certificate is None or self.key is None:
            raise TlsError("A host needs a certificate to use TLS: give TlsConf certificate= and key=.")
        arguments: dict[str, Any] = {"tls_certificates": [(_content(self.certificate), _content(self.key))]}
        if self.client_auth:
            arguments |= {"verify_client": True, "root_certificates": _content(self.ca)}
        return arguments

    def flight_client_arguments(self) -> dict[str, Any]:
        """Return arguments for ``pyarrow.flight.FlightClient``. Raises ``TlsError``."""
        arguments: dict[str, Any] = {"tls_root_certs": _content(self.ca)}
        if self.certificate is not None and self.key is not None:
            arguments |= {"cert_chain": _content(self.certificate), "private_key": _content(self.key)}
        if self.server_name is not None:
            arguments["override_hostname"] = self.server_name
        return arguments

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        assert self.certificate is not None and self.key is not None
        for path in (self.certificate, self.key):
            _content(path)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise TlsError(
                f"{self.certificate} and {self.key} are not a certificate and its private key (both PEM): {error}"
            ) from error

    def _load_ca(self, context: ssl.SSLContext) -> None:
        _content(self.ca)
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise TlsError(f"{self.ca} has no certificates of authorities (PEM): {error}") from error


class _ClientContext(ssl.SSLContext):
    """Checks the host's certificate against ``server_name``, if it is set, instead of the address of the connection."""

    server_name: str | None = None

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        """Do as ``ssl.SSLContext`` does; ``server_hostname`` must be given by name."""
        return super().wrap_socket(*args, **self._with_name(options))

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Do as ``wrap_socket``; asyncio calls this method."""
        return super().wrap_bio(*args, **self._with_name(options))

    def _with_name(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "server_hostname": self.server_name} if self.server_name else options


def refusal(address: str, error: ssl.SSLError) -> TlsError | None:
    """Return the error for a client whose TLS failed, which need not try again; None if the connection merely broke."""
    message = f"TLS with {address} failed: {error}."
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(
            f"{message} The host's certificate is not accepted: is it signed by an authority in ca=, and does it name "
            "the address, or what server_name= says?"
        )
    reason = (error.reason or "").upper()
    if "CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason or "UNKNOWN_CA" in reason:
        return TlsError(
            f"{message} The host does not accept this client: with client_auth it needs a certificate= and key= signed "
            "by an authority that the host knows."
        )
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return None
    return TlsError(f"{message} Do the hosts use TLS?")


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(
            f"{path} cannot be read on {os.uname().nodename}: {error.strerror}. TLS files must be there on every node."
        ) from error
