"""Parts that the commands about stored files share: the settings of storage, and errors as messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from spark_bridge.cli.output import errors_explained

T = TypeVar("T")

Option = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="A storage setting, name=value; spark.hadoop.fs.s3a.* as in Spark. Repeatable. Every user of this machine "
        "can read it in the process list: leave secrets to the environment (AWS_SECRET_ACCESS_KEY and others).",
    ),
]


def options_of(given: list[str] | None) -> dict[str, str]:
    """Return the settings by name; raises ``typer.BadParameter`` for one without a value."""
    pairs = [one.partition("=") for one in given or ()]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} has no value; write name=value")
    return {name: value for name, _, value in pairs}


def or_exit(call: Callable[[], T]) -> T:
    """Return the result of the call; an error of ours is printed, and ends the program with code 2."""
    with errors_explained():
        return call()
