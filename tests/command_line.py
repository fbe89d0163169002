"""``statestore`` as tests call it: its tree of commands is made of their signatures once, not at each call.

To make the tree takes 20 ms, longer than most commands.
"""

from __future__ import annotations

from functools import cache

from typer import testing

testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]
CliRunner = testing.CliRunner
