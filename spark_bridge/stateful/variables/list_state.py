"""``ListState``: a list per grouping key, as a processor uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from backends.encoding.operator_schema import StateVariable
from spark_bridge.exceptions import IllegalStateValueError
from spark_bridge.stateful.values.state_values import null_value
from spark_bridge.stateful.variables.declaration import Declaration
from spark_bridge.stateful.variables.pyspark_classes import PySparkListState
from spark_bridge.stateful.variables.step import KeyStep
from spark_bridge.stateful.variables.stored_lists import ListChange, StoredLists


class ListState(PySparkListState):
    """A state variable that holds a list per grouping key, of tuples of its schema's fields.

    Methods read and change the list of the current key; see ``StatefulProcessorHandle.getListState``.
    """

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._name = declaration.name
        self._step = step
        self._stored = StoredLists(declaration, variable, step)
        self._values = self._stored.values
        self._changes: list[ListChange | None] = []
        self._touched: list[int] = []

    def exists(self) -> bool:
        """Return whether the key's list has an element."""
        change = self._changes[self._step.index]
        if change is not None and (change.added or change.replaced):
            return bool(change.added)
        return self._stored.has_elements(self._step.current)

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the key's elements in the order in which they were added, as they are at the time of the call.

        A long list is read some chunks at a time.
        """
        change = self._changes[self._step.index]
        added = list(change.added) if change is not None else []
        parts: Iterator[tuple[Any, ...]]
        if change is not None and change.replaced:
            parts = iter(added)
        else:
            parts = self._stored.elements(self._step.current, added)
        return parts if self._values.is_immutable else map(self._values.copied, parts)

    def put(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Set the whole list; raises ``IllegalStateValueError`` if it is empty, or for an element that does not fit."""
        added = self._accepted(newState)
        change = self._change()
        change.replaced, change.added = True, added

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Add an element at the end; raises ``IllegalStateValueError`` if it does not fit the schema."""
        accepted = self._values.accept(newState)
        change = self._changes[self._step.index]
        if change is None:
            change = self._change()
        change.added.append(accepted)

    def appendList(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Add elements at the end; raises ``IllegalStateValueError`` for no elements, or for one that does not fit."""
        added = self._accepted(newState)
        self._change().added.extend(added)

    def clear(self) -> None:
        """Remove the key's list."""
        change = self._change()
        change.replaced, change.added = True, []

    def _accepted(self, elements: Iterable[tuple[Any, ...]] | None) -> list[tuple[Any, ...]]:
        if elements is None:
            raise null_value(self._name, "list")
        accepted = [self._values.accept(e) for e in elements]
        if not accepted:
            raise IllegalStateValueError(
                f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] State variable {self._name!r} was given an empty list. "
                "Give at least one element, or call clear() to remove the list."
            )
        return accepted

    def _change(self) -> ListChange:
        index = self._step.index
        change: ListChange | None = self._changes[index]
        if change is None:
            change = self._changes[index] = ListChange()
            self._touched.append(index)
        return change

    def _begin(self) -> None:
        self._changes = [None] * len(self._step.keys)
        self._touched = []
        self._stored.begin()

    def _end(self) -> None:
        """Stage the step's changes."""
        self._stored.stage(self._changes, self._touched)
        self._changes, self._touched = [], []
