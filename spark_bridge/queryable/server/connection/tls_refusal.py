"""The answer to a client whose TLS handshake has failed: why it failed."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from spark_bridge.exceptions import TlsError
from spark_bridge.queryable.protocol.messages import Failure, frame
from spark_bridge.queryable.server.connection.framed_socket import LINGER_SECONDS
from spark_bridge.transport.tls import NO_TLS

LINGER_READS = 16


def refuse_handshake(connected: socket.socket, error: ssl.SSLError) -> None:
    """Tell a client why its handshake failed, and wait a moment.

    Closing while the client still sends would take the reason from it. The caller closes the socket.
    """
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(OSError):
        if error.reason in NO_TLS:
            # A client without TLS understands no TLS alert, but a frame; as a plain socket, which this one was until
            # now.
            said = Failure(TlsError.__name__, "This host answers by TLS only: give tls= to connect.")
            socket.socket.sendall(connected, b"".join(frame(said)))
        socket.socket.shutdown(connected, socket.SHUT_WR)
        for _ in range(LINGER_READS):
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            if not socket.socket.recv(connected, 1 << 12):
                return
