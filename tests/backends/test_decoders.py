"""Threads decode a type for the first time at once. This needs a separate process: without care, it would die."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.effort import only_thorough
from tests.patience import HANG

ROUNDS = 100
CODE = f"""
import faulthandler, sys, threading
import msgspec
from backends.decoders import convert, json_decoder, msgpack_decoder

faulthandler.enable()
sys.setswitchinterval(1e-6)
TYPES = '''
class Leaf(msgspec.Struct, frozen=True):
    a: int
    b: "dict[int, tuple[str, ...]]" = {{}}
    c: "list[int] | None" = None

class Top(msgspec.Struct, frozen=True):
    x: "Leaf"
    y: "dict[str, Leaf]"
    z: "list[Leaf]"
'''
value = dict(x=dict(a=1), y=dict(k=dict(a=2)), z=[dict(a=3)])
as_json, as_msgpack = msgspec.json.encode(value), msgspec.msgpack.encode(value)

def use(how):
    start.wait()
    found.append(dict(
        convert=lambda: convert(value, Top),
        json=lambda: json_decoder(Top).decode(as_json),
        msgpack=lambda: msgpack_decoder(Top).decode(as_msgpack),
        nested=lambda: json_decoder(list[Leaf]).decode(b'[{{"a": 4}}]'),
    )[how]())

for _ in range({ROUNDS}):
    exec(TYPES, globals())
    found, start = [], threading.Barrier(4)
    threads = [threading.Thread(target=use, args=(how,)) for how in (sys.argv[1], sys.argv[2]) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = Top(Leaf(1), dict(k=Leaf(2)), [Leaf(3)])
    assert len(found) == 4 and all(f in (wanted, [Leaf(4)]) for f in found), found
"""


@pytest.mark.parametrize(
    ("one", "other"), [("json", "json"), only_thorough("msgpack", "convert"), only_thorough("nested", "json")]
)
def test_many_threads_decode_a_type_for_the_first_time(one: str, other: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, one, other], capture_output=True, text=True, check=False, timeout=HANG
    )
    assert done.returncode == 0, done.stderr[:3000]
