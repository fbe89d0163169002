"""The fixture ``tests/fixtures/wire-1``: exchanges of a client with the query port, byte by byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from spark_bridge.queryable.protocol import FRAME_PREFIX, Reply, RowsReply, decode_reply
from tests.spark_bridge.queryable.memory_reads import RawClient

FIXTURE = Path(__file__).parents[2] / "fixtures" / "wire-1" / "query_port.json"


@dataclass(frozen=True)
class Exchange:
    """One request, and the frames of its answer."""

    what: str
    said: bytes
    heard: tuple[bytes, ...]


def exchanges() -> list[Exchange]:
    """Return what the fixture has, in order."""
    return [
        Exchange(e["what"], bytes.fromhex(e["said"]), tuple(map(bytes.fromhex, e["heard"])))
        for e in json.loads(FIXTURE.read_text())
    ]


class RecordedClient(RawClient):
    """Says bytes, and keeps the frames that it hears."""

    def __init__(self, address: str) -> None:
        super().__init__(address, token=None)

    def exchange(self, said: bytes) -> list[bytes]:
        """Say a request, and return the frames of its answer."""
        self.socket.sendall(said)
        frames = []
        while True:
            prefix = self._exactly(FRAME_PREFIX.size)
            frames.append(prefix + self._exactly(FRAME_PREFIX.unpack(prefix)[0]))
            if not isinstance(parts(frames[-1])[0], RowsReply):
                return frames


def parts(frame: bytes) -> tuple[Reply, bytes]:
    """Return header and body of a frame."""
    _, header = FRAME_PREFIX.unpack(frame[: FRAME_PREFIX.size])
    content = frame[FRAME_PREFIX.size :]
    return decode_reply(content[:header]), content[header:]


def meaning(frames: list[bytes] | tuple[bytes, ...]) -> tuple[list[Reply], object]:
    """Return what an answer says: its headers, and its body, or its rows where these come as Arrow."""
    split = [parts(frame) for frame in frames]
    bodies = b"".join(body for reply, body in split if isinstance(reply, RowsReply))
    rows = pa.ipc.open_stream(bodies).read_all().to_pydict() if bodies else [body for _, body in split]
    return [reply for reply, _ in split], rows
