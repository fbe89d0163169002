"""Partitions to be read, packed for the way to another process: a chain of many versions names many files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from backends.decoders import msgpack_decoder
from coordinator_actor.reading.stored_versions import Piece
from spark_bridge.state_data.state_sources import AnySource, ChangesSource, InsertsSource, StateSource


def packed_pieces(pieces: Sequence[Piece]) -> tuple[bytes, ...]:
    """Return the bytes of each piece."""
    return tuple(zlib.compress(msgspec.msgpack.encode(piece)) for piece in pieces)


def unpacked_piece(packed: bytes) -> Piece:
    """Return the piece of ``packed_pieces``."""
    return msgpack_decoder(Piece).decode(zlib.decompress(packed))


def without_pieces(source: AnySource) -> AnySource:
    """Return a source without its pieces, which go to other processes one by one."""
    reading = replace(source.reading, pieces=())
    match source:
        case StateSource():
            return replace(source, reading=reading)
        case ChangesSource():
            return replace(source, reading=reading)
        case InsertsSource():
            return replace(source, reading=reading)
