"""The object of a state variable that ``init`` has declared and then deleted: every use is an error."""

from __future__ import annotations

from typing import Any, NoReturn

from pyspark.errors import PySparkRuntimeError

from spark_bridge.exceptions import HandleStateError

_DOING = {
    "exists": "checking {kind} state exists",
    "get": "getting {kind} state",
    "getValue": "getting value",
    "containsKey": "checking if {kind} state contains key",
    "clear": "clearing {kind} state",
    "removeKey": "removing key from {kind} state",
}


class DeletedStateError(HandleStateError, PySparkRuntimeError):  # type: ignore[misc]
    """A state variable was used that ``init`` has declared and then deleted; of PySpark's own class, too."""


class DeletedState:
    """A state variable whose every method raises ``DeletedStateError``, in the words of PySpark's error."""

    def __init__(self, name: str, kind: str) -> None:
        self._name = name
        self._kind = kind

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        doing = _DOING.get(method, "updating {kind} state").format(kind=self._kind)
        message = (
            f"Error {doing}: {self._kind.capitalize()} state {self._name} is not initialized. init() has deleted it "
            "after it had declared it: leave out deleteIfExists, or the variable."
        )

        def refuse(*_: object, **__: object) -> NoReturn:
            raise DeletedStateError(message)

        return refuse


def make_deleted(state: Any, name: str, kind: str) -> None:
    """Turn a state variable's object, to which the processor has a reference, into a ``DeletedState``."""
    vars(state).clear()
    state.__class__ = DeletedState
    state.__init__(name, kind)
