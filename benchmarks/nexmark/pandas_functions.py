"""The queries' logic for ``applyInPandasWithState``, Spark 3.5's operator for everything that it cannot aggregate.

Times are microseconds since 1970. State and rows are those of ``processors.py``. Lists in a state are JSON: PySpark
4.2.1 makes the schema of the state lower case on its way to the worker, where an array then has no ``elementType``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from .processors import AUCTION, EXPIRES, OPENED, TOP, to_ms, winner

TOP_STATE = "bids string"
WINNING_STATE = f"{AUCTION}, price long, bid_us long, bidder long, bid_extra string, waiting string"
_AUCTION_COLUMNS = [field.split()[0] for field in AUCTION.split(", ")]
_BID_COLUMNS = ["price", "us", "bidder", "bid_extra"]
_WINNING_COLUMNS = ["id", *_AUCTION_COLUMNS, "bidder", "price", "bid_us", "bid_extra"]


@dataclass
class WithNewArrow:
    """A function for ``applyInPandasWithState`` that repairs PySpark 3.5 for recent releases of pyarrow.

    With these releases, the offsets of a key's rows are floats, and PySpark cannot slice by them: ``TypeError: 'float'
    object cannot be interpreted as an integer``. The repair happens when the function is unpickled, before the first
    rows.
    """

    function: Callable[[Any, Iterator[pd.DataFrame], Any], Iterator[pd.DataFrame]]

    def __call__(self, key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        """Call the function."""
        return self.function(key, frames, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        from pyspark.sql.pandas.serializers import ApplyInPandasWithStateSerializer as Serializer

        # PySpark 4.2 does not need it, and has no such method.
        if hasattr(Serializer, "arrow_to_pandas") and not getattr(Serializer, "keeps_integers", False):
            usual = Serializer.arrow_to_pandas

            def arrow_to_pandas(self: Any, column: pa.ChunkedArray, *given: Any, **named: Any) -> Any:
                if pa.types.is_struct(column.type) and column.type.get_field_index("numRows") >= 0:
                    return pd.Series(column.to_pylist(), dtype=object)
                return usual(self, column, *given, **named)

            Serializer.arrow_to_pandas = arrow_to_pandas
            Serializer.keeps_integers = True


def last_bid(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Handle q18; see ``processors.last_bid``."""
    columns = ["us", "price", "channel", "url", "extra"]
    last = max(row for frame in frames for row in _rows(frame, columns))
    if state.exists:
        last = max(last, tuple(state.get))
    state.update(last)
    yield pd.DataFrame([(*key, *last)], columns=["bidder", "auction", *columns])


def top_bids(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Handle q19; see ``processors.top_bids``."""
    columns = ["price", "us", "bidder", "channel", "url", "extra"]
    bids = [row for frame in frames for row in _rows(frame, columns)]
    if state.exists:
        bids += _bids(state.get[0])
    top = sorted(bids, reverse=True)[:TOP]
    state.update((json.dumps(top),))
    answer = pd.DataFrame(top, columns=columns)
    answer.insert(0, "auction", key[0])
    answer["rank_number"] = range(1, len(top) + 1)
    yield answer


def winning_bid(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Handle q9; see ``processors.winning_bid``. A key has one timeout, never in the past."""
    watermark_ms = state.getCurrentWatermarkMs()
    auction, best, waiting = _winning_state(state)
    if not state.hasTimedOut:
        for frame in frames:
            is_bid = frame["expires_us"].isna()
            waiting += _rows(frame[is_bid], _BID_COLUMNS)
            for row in _rows(frame[~is_bid], _AUCTION_COLUMNS):
                auction = tuple(int(v) if isinstance(v, float) else v for v in row)
    if auction is None:
        waiting = [bid for bid in waiting if to_ms(bid[1]) > watermark_ms]
        if waiting:
            _update(state, auction, best, waiting, max(to_ms(bid[1]) for bid in waiting))
        else:
            state.remove()
        return
    best = winner(waiting, auction[OPENED], auction[EXPIRES], best)
    if to_ms(auction[EXPIRES]) > watermark_ms:
        _update(state, auction, best, [], to_ms(auction[EXPIRES]))
        return
    if state.exists:
        state.remove()
    if best is not None:
        price, us, bidder, extra = best
        yield pd.DataFrame([(key[0], *auction, bidder, price, us, extra)], columns=_WINNING_COLUMNS)


def _rows(frame: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    # A column of integers that has nulls elsewhere is one of floats.
    lists = [frame[c].astype("int64") if frame[c].dtype.kind == "f" else frame[c] for c in columns]
    return list(zip(*(column.tolist() for column in lists), strict=True))


def _bids(text: str) -> list[tuple[Any, ...]]:
    return [tuple(bid) for bid in json.loads(text)]


def _winning_state(state: Any) -> tuple[Any, Any, list[Any]]:
    if not state.exists:
        return None, None, []
    values = tuple(state.get)
    n = len(_AUCTION_COLUMNS)
    auction, best, waiting = values[:n], values[n : n + 4], values[n + 4]
    return (
        None if auction[EXPIRES] is None else auction,
        None if best[0] is None else best,
        _bids(waiting),
    )


def _update(state: Any, auction: Any, best: Any, waiting: list[Any], timeout_ms: int) -> None:
    state.update((*(auction or (None,) * len(_AUCTION_COLUMNS)), *(best or (None,) * 4), json.dumps(waiting)))
    state.setTimeoutTimestamp(timeout_ms)
