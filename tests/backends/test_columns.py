"""Arrays whose elements have one width take shorter ways: they must lead to the same."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.columns import even_array, even_rows, placed, taken
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
    there = taken(array, rows)
    assert there.to_pylist() == [array[i].as_py() for i in order]
    assert placed(there, rows).equals(array)


def test_rows_that_are_not_there_are_not_taken():
    with pytest.raises(IndexError):
        taken(binary([b"ab", b"cd"]), np.array([2]))


@pytest.mark.parametrize("values", [[b"ab", b"c", b"def"], [b"abcd", b"", b""], [b"a", b"", b"bc"]])
def test_as_many_bytes_as_of_one_width_are_not_yet_rows_of_one(values):
    assert even_rows(binary([*values, values[0]])) is None
    assert even_rows(binary(values)) is None


@pytest.mark.parametrize("values", [[b"a", b"b", b"c", b"d"], [b"a", b"", b"ccc", None]])
def test_an_order_is_undone(values):
    """One that is not its own inverse."""
    rows = np.array([2, 0, 3, 1])
    assert taken(binary(values), rows).to_pylist() == [values[2], values[0], values[3], values[1]]
    assert placed(binary(values), rows).to_pylist() == [values[1], values[3], values[0], values[2]]
