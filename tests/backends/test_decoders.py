"""Threads decode a type for the first time at once. This needs a separate process: without care, it would die.

Hosts and the coordinator start without pandas and Spark, which nothing of theirs needs.
"""

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


# One process for all, because the imports cost the time: actors keep pandas out when they start, not before.
IMPORTS = """
import sys

def check(what):
    assert not {"pandas", "pyspark"} & set(sys.modules), f"{what} imports pandas or Spark"

import coordinator_actor.actor
check("the coordinator")
import spark_bridge.host_actor
check("a host")

from backends.decoders import keep_pandas_out
keep_pandas_out()
import pyarrow as pa
assert pa.array([1, None]).to_pylist() == [1, None] and pa.scalar(b"x").as_py() == b"x"
check("pyarrow")
import pandas  # an explicit import still works
assert pa.array([3.0, float("nan")]).null_count == 0
"""


def test_actors_and_pyarrow_import_neither_pandas_nor_spark() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=HANG)
    assert ran.returncode == 0, ran.stderr
