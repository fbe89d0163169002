"""The results that a contestant has written, and whether they are right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from alternatives.given import Totals

LINE = re.compile(r"(?P<gone>-[UD])?\[?(?P<user>\d+), ?(?P<n>\d+), ?(?P<spent>\d+)\]?$")
"""``user,n,spent``; or Flink's print: ``2> +U[user, n, spent]``, with -U and -D for what no longer holds."""
LOOK_EVERY = 0.001


class Results:
    """Follows the files of a directory. Of each user the result with the greatest count is the last one."""

    def __init__(self, directory: Path) -> None:
        self.last: Totals = {}
        self._directory = directory
        self._read: dict[Path, int] = {}

    def look(self) -> Totals:
        """Read what has been written since the last look, and return the last results."""
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                found = LINE.search(line)
                if found is None or found["gone"]:
                    continue
                user, n, spent = int(found["user"]), int(found["n"]), int(found["spent"])
                if n >= self.last.get(user, (0, 0))[0]:
                    self.last[user] = (n, spent)
        return self.last

    def wait(self, is_there: Callable[[Totals], bool], seconds: float, alive: Callable[[], None]) -> bool:
        """Wait for results; return whether they came in time. ``alive`` raises if no process is left to write them."""
        deadline = time.monotonic() + seconds
        while not is_there(self.look()):
            if time.monotonic() > deadline:
                return False
            alive()
            time.sleep(LOOK_EVERY)
        return True


def are_counted(totals: Totals, expected: Totals) -> bool:
    """Return whether every expected user has as many rows as expected, whatever their sum."""
    return all(user in totals and totals[user][0] >= n for user, (n, _) in expected.items())


def check(contestant: str, found: Totals, expected: Totals) -> None:
    """Raise ``AssertionError`` unless counts and sums of all users are equal."""
    wrong = [user for user in sorted({*found, *expected}) if found.get(user) != expected.get(user)]
    if wrong:
        shown = ", ".join(f"user {u}: {found.get(u)}, not {expected.get(u)}" for u in wrong[:3])
        raise AssertionError(
            f"{contestant} has other totals (count, sum) than expected of {len(wrong):,} of {len(expected):,} users: "
            f"{shown}."
        )
