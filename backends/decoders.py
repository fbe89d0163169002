"""msgspec's decoders, created by one thread at a time.

When msgspec (0.22) decodes a type for the first time, it builds a description of the type and attaches it to the type
before the description is complete. If another thread decodes the same type, or a type that contains it, at that moment,
it reads an incomplete description, and the process ends with a segmentation fault. So the whole project decodes with
these functions; ruff rejects msgspec's own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, overload

import msgspec
import pyarrow as pa

T = TypeVar("T")
DecHook = Callable[[type[Any], Any], Any]

_made: dict[tuple[Any, ...], Any] = {}
_making = threading.Lock()


@overload
def json_decoder(kind: type[T], dec_hook: DecHook | None = None) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any, dec_hook: DecHook | None = None) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any, dec_hook: DecHook | None = None) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON to ``kind``: a type, or a union of types."""
    decoder: msgspec.json.Decoder[Any] = _decoder(msgspec.json.Decoder, kind, dec_hook)
    return decoder


@overload
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of MessagePack to ``kind``: a type, or a union of types."""
    decoder: msgspec.msgpack.Decoder[Any] = _decoder(msgspec.msgpack.Decoder, kind, None)
    return decoder


@overload
def convert(value: object, kind: type[T], *, str_keys: bool = False) -> T: ...
@overload
def convert(value: object, kind: Any, *, str_keys: bool = False) -> Any: ...
def convert(value: object, kind: Any, *, str_keys: bool = False) -> Any:
    """Convert a value that was decoded without a type to ``kind``, as ``msgspec.convert`` does."""
    msgpack_decoder(kind)
    return msgspec.convert(value, kind, str_keys=str_keys)


def _decoder(decoder: Any, kind: Any, dec_hook: DecHook | None) -> Any:
    wanted = (decoder, kind, dec_hook)
    cached = _made.get(wanted)
    if cached is None:
        with _making:
            cached = _made[wanted] = decoder(kind, dec_hook=dec_hook)
    return cached


def _after_fork() -> None:
    """Replace the lock after a fork: a thread that the forked process does not have may have held it."""
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Keep pandas out of a process that does not use pandas: the import takes as long as that of all our own modules.
#
# pyarrow imports pandas, if pandas is installed, the first time that it makes an array or a scalar, only to see
# whether the given value is of pandas.


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is kept out of this process while pyarrow looks for it")
        return None


def keep_pandas_out() -> None:
    """Make pyarrow take pandas for not installed in this process; too late if pyarrow has looked for pandas already."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
