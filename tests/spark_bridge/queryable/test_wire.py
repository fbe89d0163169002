"""Keys and values as bodies of frames."""

import random
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.columns import EVEN_ROWS, EVEN_WIDTH
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol import pack_bytes, unpack_bytes
from tests.effort import examples

VALUES = st.one_of(
    st.lists(st.binary(min_size=5, max_size=5), max_size=8),  # of one width, which takes a shorter way
    st.lists(st.one_of(st.none(), st.binary(max_size=3)), max_size=8),
)


def packed(values):
    """As the module describes it."""
    lengths = [-1 if value is None else len(value) for value in values]
    return struct.pack(f"<I{len(values)}i", len(values), *lengths) + b"".join(value or b"" for value in values)


@settings(deadline=None, max_examples=examples(200))
@given(VALUES, st.integers(0, 3))
def test_a_body_is_as_described_and_read_back(values, begin):
    array = pa.array(values, pa.binary()).slice(begin)
    body = pack_bytes(array)
    assert bytes(body) == packed(values[begin:])
    read = unpack_bytes(memoryview(body))
    assert read.to_pylist() == values[begin:]
    read.validate(full=True)


@settings(deadline=None, max_examples=examples(200))
@given(VALUES, st.data())
def test_invalid_body_is_rejected(values, data):
    body = packed(values)
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    with pytest.raises(RequestError):
        unpack_bytes(cut)
    with pytest.raises(RequestError):
        unpack_bytes(body + b"x")


@pytest.mark.parametrize("lengths", [[-2, -2], [5, -2], [1 << 30, 1 << 30], [3, 8]])
def test_lengths_that_cannot_be_are_refused(lengths):
    with pytest.raises(RequestError):
        unpack_bytes(struct.pack("<I2i", 2, *lengths) + b"0123456789")


@pytest.mark.parametrize("n", [1, 1000, EVEN_ROWS, EVEN_ROWS + 1])
@pytest.mark.parametrize("width", [1, 40, EVEN_WIDTH, EVEN_WIDTH + 1])
def test_many_of_one_width_are_read_back(n, width):
    content = random.Random(n).randbytes(n * width)
    values = [content[at : at + width] for at in range(0, n * width, width)]
    body = pack_bytes(pa.array(values, pa.binary()))
    assert body == packed(values)
    read = unpack_bytes(memoryview(body))
    read.validate(full=True)
    assert read.to_pylist() == values


@pytest.mark.parametrize("lengths", [(2, 1, 3), (2, 3, 1), (1, 0, 2), (2, -1, 4)])
def test_as_many_bytes_as_of_one_width_are_not_taken_for_it(lengths):
    values = [None if length < 0 else b"abcd"[:length] for length in lengths]
    assert unpack_bytes(packed(values)).to_pylist() == values
