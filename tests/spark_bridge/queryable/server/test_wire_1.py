"""A client of the release that made ``tests/fixtures/wire-1`` is answered as it was then, byte for byte or refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    PROTOCOL,
    Failure,
    Hello,
    LookupReply,
    LookupRequest,
    Welcome,
    decode_reply,
    pack_one,
)
from tests.spark_bridge.queryable.memory_reads import TOKEN, MemoryReads, RawClient, frame_bytes, serving
from tests.spark_bridge.queryable.wire_fixture import RecordedClient, exchanges, meaning


def test_a_client_of_protocol_1_is_answered_as_it_was() -> None:
    """Arrow may lay rows out otherwise; they are compared as rows, and everything else byte by byte."""
    with serving() as (server, _), RecordedClient(server.server_address) as client:
        for one in exchanges():
            heard = client.exchange(one.said)
            if one.what == "hello":
                # The host's clock comes after all that protocol 1 reads.
                header = frame_bytes(msgspec.structs.replace(meaning(heard)[0][0], now_us=0))
                assert meaning([header]) == meaning(one.heard)
                continue
            if one.what == "locate":
                # A location and its hosts have more fields now: a client of protocol 1 ignores them.
                (_, (now,)), (_, (before,)) = meaning(heard), meaning(one.heard)
                assert has_all_of(json.loads(now), json.loads(before)), (now, before)
                continue
            assert meaning(heard) == meaning(one.heard), one.what
            if len(heard) == 1:
                assert heard[0] == one.heard[0], one.what


def has_all_of(now: Any, before: Any) -> bool:
    """Return whether JSON has the values of other JSON: objects may have further fields."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(k in now and has_all_of(now[k], v) for k, v in before.items())
    if isinstance(before, list):
        return isinstance(now, list) and len(now) == len(before) and all(map(has_all_of, now, before))
    return bool(now == before)


class OldReply(Struct, frozen=True, array_like=True, tag="values"):
    """``LookupReply`` as a client of protocol 1 knows it."""

    version: int


def test_client_of_protocol_1_reads_an_answer_with_a_lag() -> None:
    class Late(MemoryReads):
        def lag_ms(self, run_id: str) -> int:
            return 12_345

    with serving(Late()) as (server, _), RawClient(server.server_address) as client:
        client.say(LookupRequest("run", "totals"), pack_one(b"k1"))
        length, header_length = FRAME_PREFIX.unpack(client._exactly(FRAME_PREFIX.size))
        received = client._exactly(length)
    header, body = received[:header_length], received[header_length:]
    assert msgspec.msgpack.decode(header, type=OldReply) == OldReply(7) and body == pack_one(b"v1")
    assert decode_reply(header) == LookupReply(7, 12_345)


def test_current_client_sends_requests_that_protocol_1_understands() -> None:
    said = {one.what: one.said for one in exchanges()}
    assert frame_bytes(Hello(PROTOCOL, TOKEN)) == said["hello"]


@pytest.mark.parametrize("other", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_with_both_numbers(other: int) -> None:
    with serving() as (server, _), RawClient(server.server_address, token=None) as client:
        (reply, _) = client.ask(Hello(other, TOKEN))
        assert isinstance(reply, Failure) and not isinstance(reply, Welcome)
        assert f"protocol {other}, this host {PROTOCOL}" in reply.message
        assert client.is_closed()
