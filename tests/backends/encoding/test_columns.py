"""Arrays whose elements have one width take shorter ways: they must lead to the same."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.columns import (
    EVEN_ROWS,
    EVEN_WIDTH,
    concatenated,
    content_bytes,
    even_array,
    even_rows,
    normalized_column,
    placed,
    take_binary,
)
from backends.exceptions import InvalidStateStoreArgument
from tests.effort import examples


def binary(values):
    return pa.array(values, pa.binary())


@st.composite
def arrays(draw):
    """Of one width or of several, with nulls or without, a slice or whole."""
    widths = draw(st.sampled_from([(0, 0), (1, 1), (3, 3), (11, 11), (0, 4)]))
    element = st.binary(min_size=widths[0], max_size=widths[1])
    values = draw(st.lists(st.one_of(st.none(), element) if draw(st.booleans()) else element, max_size=8))
    begin = draw(st.integers(0, len(values)))
    return binary(values).slice(begin, draw(st.integers(0, len(values) - begin)))


@settings(deadline=None, max_examples=examples(200))
@given(arrays())
def test_rows_of_one_width_are_the_elements(array):
    values = array.to_pylist()
    rows = even_rows(array)
    is_even = bool(values) and None not in values and len(set(map(len, values))) == 1 and values[0] != b""
    assert (rows is not None) == is_even
    if rows is not None:
        assert [row.tobytes() for row in rows] == values
        assert even_array(rows).equals(array)


@settings(deadline=None, max_examples=examples(200))
@given(arrays(), st.randoms())
def test_elements_are_taken_and_put_back(array, rng):
    order = list(range(len(array)))
    rng.shuffle(order)
    rows = np.array(order, np.int64)
    there = take_binary(array, rows)
    assert there.to_pylist() == [array[i].as_py() for i in order]
    assert placed([there], [rows]).equals(array)


def test_rows_that_are_not_there_are_not_taken():
    with pytest.raises(IndexError):
        take_binary(binary([b"ab", b"cd"]), np.array([2]))


@pytest.mark.parametrize("values", [[b"ab", b"c", b"def"], [b"abcd", b"", b""], [b"a", b"", b"bc"]])
def test_as_many_bytes_as_of_one_width_are_not_yet_rows_of_one(values):
    assert even_rows(binary([*values, values[0]])) is None
    assert even_rows(binary(values)) is None


@pytest.mark.parametrize("values", [[b"a", b"b", b"c", b"d"], [b"a", b"", b"ccc", None]])
def test_an_order_is_undone(values):
    """One that is not its own inverse."""
    rows = np.array([2, 0, 3, 1])
    assert take_binary(binary(values), rows).to_pylist() == [values[2], values[0], values[3], values[1]]
    assert placed([binary(values)], [rows]).to_pylist() == [values[1], values[3], values[0], values[2]]


@pytest.mark.parametrize("n", [1, 7, EVEN_ROWS, EVEN_ROWS + 1])
@pytest.mark.parametrize("width", [1, 10, EVEN_WIDTH, EVEN_WIDTH + 1])
def test_arrays_and_their_slices_of_one_width_are_recognized(n, width):
    rows = np.frombuffer(np.random.default_rng(n).bytes(n * width), f"V{width}")
    array = even_array(rows)
    array.validate(full=True)
    assert array.to_pylist() == [row.tobytes() for row in rows]
    for part in (array, array.slice(n // 2), array.slice(n // 3, n // 3 + 1), array[: n - 1]):
        copied = binary(part.to_pylist())  # has separate offsets
        assert content_bytes(part) == content_bytes(copied) == len(part) * width
        found, seen = even_rows(part), even_rows(copied)
        if not len(part):
            assert found is seen is None
        else:
            assert found.tobytes() == seen.tobytes() == b"".join(part.to_pylist())


def test_a_mask_over_rows_of_one_width_is_seen():
    even = even_array(np.zeros(4, "V3"))
    masked = pa.Array.from_buffers(pa.binary(), 4, [pa.py_buffer(b"\x0d"), *even.buffers()[1:]])
    assert even_rows(masked) is None and even_rows(masked.slice(2)) is not None
    assert masked.to_pylist() == [b"\0\0\0", None, b"\0\0\0", b"\0\0\0"]


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(arrays(), max_size=4))
def test_arrays_are_joined(given):
    values = [value for array in given for value in array.to_pylist()]
    joined = concatenated(given)
    joined.validate(full=True)
    assert joined.to_pylist() == values
    assert content_bytes(joined) == sum(len(value or b"") for value in values)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(arrays(), min_size=1, max_size=4), st.randoms())
def test_parts_are_put_into_their_rows(given, rng):
    values = [value for array in given for value in array.to_pylist()]
    order = list(range(len(values)))
    rng.shuffle(order)
    rows, begin = [], 0
    for array in given:
        rows.append(np.array(order[begin : begin + len(array)], np.int64))
        begin += len(array)
    wanted = [None] * len(values)
    for place, value in zip(order, values, strict=True):
        wanted[place] = value
    assert placed(given, rows).to_pylist() == wanted


def large(kind):
    """One text of 1.5 GB, of pages that the system has not filled yet."""
    content = np.zeros(1_500_000_000, np.uint8)
    offsets = np.array([0, len(content)], np.int64 if kind == pa.large_string() else np.int32)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_a_column_of_more_than_two_gib_is_refused(kind):
    chunks = pa.chunked_array([large(kind), large(kind)])
    with pytest.raises(InvalidStateStoreArgument, match=r"Column 'text' has more than the 2 GiB .*: use smaller"):
        normalized_column("text", chunks)
