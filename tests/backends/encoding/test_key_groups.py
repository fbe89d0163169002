"""Key groups must be Spark's, bit for bit: rows are shuffled by Spark's hash and stored by ours."""

import datetime as dt
import random
import struct
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from backends.encoding import key_groups as xxhash64
from backends.encoding.key_groups import key_groups, partition_of, partition_range, spark_xxhash64
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError

NAN, INF = float("nan"), float("inf")
UTC = dt.timezone.utc
# What xxhash64 of Spark 3.5.7 gave for each value.
GOLDEN = [
    (pa.int8(), [0, -1, -128, 127, None],
     [3614696996920510707, 2017008487422258757, 4160238337661960656, 8632298611707923906, 42]),
    (pa.int16(), [300, -32768], [4595878464234128934, -904511417458573795]),
    (pa.int32(), [0, 1, -1, 2147483647, -2147483648, None],
     [3614696996920510707, -6698625589789238999, 2017008487422258757, 1508894993788531228, 2073849959933241805, 42]),
    (pa.int64(), [0, 42, -1, 9223372036854775807, -9223372036854775807, None],
     [-5252525462095825812, -6876166290308861218, 3858142552250413010, -3246596055638297850, -3362613479881488794, 42]),
    (pa.bool_(), [True, False, None], [-6698625589789238999, 3614696996920510707, 42]),
    (pa.date32(), [dt.date(1970, 1, 1), dt.date(2013, 12, 31), dt.date(1900, 1, 1)],
     [3614696996920510707, -384576649632608061, 87636426632586988]),
    (pa.timestamp("us", tz="UTC"),
     [dt.datetime(2013, 1, 1, 5, 17, tzinfo=UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)],
     [-9090316226065074151, 3858142552250413010]),
    (pa.timestamp("us"), [dt.datetime(2013, 1, 1, 5, 17, 0, 123456)], [6018529094554468181]),
    (pa.float32(), [0.0, -0.0, NAN, 1.5, -INF],
     [3614696996920510707, 3614696996920510707, 2692338816207849720, 6163473420726370430, -7580553461823983095]),
    (pa.float64(), [0.0, -0.0, NAN, 3.141592653589793, INF, -1e300],
     [-5252525462095825812, -5252525462095825812, -3127944061524951246, 5978819882446174359, 5810986238603807492,
      3086024234770041280]),
    (pa.decimal128(10, 2), [Decimal("1.25"), Decimal("-99999999.99"), None],
     [2287599437899865974, 8762893120686426508, 42]),
    (pa.decimal128(38, 10),
     [Decimal("1.25"), Decimal("-1.25"), Decimal("1234567890123456789012345678.0123456789"), Decimal(0),
      Decimal("-0.0000000128"), Decimal("0.0000000128")],
     [-8489822870732595864, 1970899566362588294, -2748047213103270372, -8959994473701255385, -7898411661632158123,
      6715097930120473301]),
    (pa.string(), ["", "a", "N14228", "schöne Grüße, 世界", "0123456789abcdef" * 5, None],
     [-7444071767201028348, -8582455328737087284, 2818031054348419725, -4564770426860293710, 6610667476800945950, 42]),
    (pa.binary(), [b"", b"\x00\xff\x00", None], [-7444071767201028348, -7098388108249174053, 42]),
    (pa.list_(pa.int32()), [[1, 2, None, 3], [], None], [8592097078962733837, 42, 42]),
    (pa.list_(pa.string()), [["a", None, "b"], [""]], [-7357372313250070212, -7444071767201028348]),
    (pa.list_(pa.list_(pa.int64())), [[[1, 2], [], None, [3]]], [4904562767517797033]),
    (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": "x"}, {"a": None, "b": "x"}, None],
     [8510603489595372987, -5636050478767222463, 42]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "hashes"), GOLDEN, ids=[str(g[0]) for g in GOLDEN])
def test_hashes_are_sparks(kind, values, hashes):
    column = pa.array(values, kind)
    assert spark_xxhash64(pa.record_batch([column], names=["k"])).tolist() == hashes
    sliced = pa.concat_arrays([column, column]).slice(len(column))
    assert spark_xxhash64(pa.record_batch([sliced], names=["k"])).tolist() == hashes


def test_several_columns_chain_as_sparks_do():
    def hashed(*columns):
        return spark_xxhash64(
            pa.record_batch([pa.array([v], t) for v, t in columns], names=list("abcdef")[: len(columns)])
        )[0]

    assert hashed((42, pa.int64()), ("a", pa.string())) == -4770586494119066414
    assert hashed((None, pa.int64()), ("a", pa.string())) == -8582455328737087284
    assert hashed((None, pa.int64()), (None, pa.string())) == 42
    assert hashed(
        (1, pa.int32()), (2.5, pa.float64()), (dt.date(2013, 1, 1), pa.date32()), (Decimal("1.5"), pa.decimal128(5, 1)),
        ("x", pa.string()), (True, pa.bool_()),
    ) == -2211027289276103368  # fmt: skip
    assert hashed(
        ([1, None], pa.list_(pa.int32())), ({"a": 1, "b": "x"}, GOLDEN[-1][0]), (b"\x01", pa.binary())
    ) == 2284267029033583876  # fmt: skip


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 65536))
def test_long_hashes_are_xxh64_with_seed_42(values, num_groups):
    expected = [xxhash.xxh64_intdigest(struct.pack("<q", i), seed=42) for i in values]
    batch = pa.record_batch({"k": pa.array(values, pa.int64())})
    assert spark_xxhash64(batch).view(np.uint64).tolist() == expected
    signed = [h - 2**64 if h >= 2**63 else h for h in expected]
    assert key_groups(batch, num_groups).tolist() == [h % num_groups for h in signed]


@pytest.mark.parametrize("number", [1, 100, 101, 3000])
@pytest.mark.parametrize("most", [0, 3, 31, 40, 200, 700])
def test_hashes_of_strings_are_xxh64_with_the_hash_before_as_seed(number, most):
    rng = random.Random(number + most)
    lengths = [rng.randint(0, most) for _ in range(number)] if number != 3000 else [most] * number
    strings = [rng.randbytes(length) for length in lengths]
    ids = [rng.getrandbits(63) for _ in strings]
    batch = pa.record_batch({"i": pa.array(ids, pa.int64()), "s": pa.array([b"before", *strings], pa.binary())[1:]})
    seeds = [xxhash.xxh64_intdigest(struct.pack("<q", i), seed=42) for i in ids]
    expected = [xxhash.xxh64_intdigest(s, seed=seed) for s, seed in zip(strings, seeds, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xxhash64, "HASH_STEP_ROWS", 1024)
        assert spark_xxhash64(batch).view(np.uint64).tolist() == expected


def test_a_map_is_refused_by_name_even_when_nested():
    kind = pa.struct([("m", pa.map_(pa.string(), pa.int64()))])
    with pytest.raises(UnsupportedTypeError, match=r"'k\.m'.*map"):
        key_groups(pa.record_batch([pa.array([None], kind)], names=["k"]), 8)
    with pytest.raises(UnsupportedTypeError, match=r"'t'.*ns"):
        key_groups(pa.record_batch([pa.array([1], pa.timestamp("ns"))], names=["t"]), 8)


@given(st.integers(1, 3000).flatmap(lambda g: st.tuples(st.just(g), st.integers(1, g))))
def test_partitions_own_contiguous_ranges_that_cover_all_groups(sizes):
    num_groups, n = sizes
    ranges = [partition_range(p, n, num_groups) for p in range(n)]
    assert ranges[0][0] == 0 and ranges[-1][1] == num_groups
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(partition_of(g, num_groups, n) == p for p, (a, b) in enumerate(ranges) for g in {a, b - 1})
    assert all(a < b for a, b in ranges)


def test_more_partitions_than_groups_are_refused():
    with pytest.raises(InvalidStateStoreArgument, match="9 partitions for 8"):
        partition_range(0, 9, 8)
    with pytest.raises(InvalidStateStoreArgument, match="65536, not 65537"):
        key_groups(pa.record_batch({"k": [1]}), 65537)
