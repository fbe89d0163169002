"""Situations that a search must reach at least once: a rule is worth little where no situation tests it.

After the "sometimes" assertions of FoundationDB and Antithesis. Code that sees a situation calls ``sometimes`` with its
name. A search prints how often each was reached, and fails if one of them never was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.simulation import scheduler as scheduling

MUST_BE_REACHED: Mapping[str, tuple[str, ...]] = {
    "forgetting": (
        "files are exchanged",
        "files are exchanged after retention has removed others",
        "an exchange is asked for again that was made already",
        "a forgetter begins again, for the query has gone on",
        "a forgetter stands still for longer than its hold lasts",
        "a forgetter dies",
        "keys of a stopped query are forgotten",
        "a key that was forgotten is written again",
        "a late write brings rows of forgotten keys back, which count for nothing",
    ),
    "moves": (
        "a host that was to go is released",
        "a host that was to go stays",
        "partitions move at once, as the user asks",
        "a host that would lose its last partitions keeps them",
        "a host dies while partitions are to move to it",
    ),
    "standbys": (
        "a copy follows its owner",
        "a copy answers a client",
        "a copy takes over from a lost owner",
        "the owner and a copy of a partition are lost at once",
    ),
    "detection": (
        "a dead host is given up as soon as it refuses a connection",
        "a host is given up as its machine is silent",
        "a living host is given up for probes that are wrong",
        "a host reports an owner that a task cannot reach",
    ),
    "recovery": (
        "a host begins with the files of its predecessor",
        "a coordinator meets a fence",
        "a direct message reaches a coordinator that was replaced",
        "a host reports a run again that its coordinator does not know",
        "Spark commits a batch that no manifest names",
        "a reader itself sees that Spark has not committed a batch",
        "a version that was prepared is made again by another run",
        "an engine finds its disk full",
        "a database that was only read finds its files gone",
        "a partition is evicted, after a commit of a running batch",
        "a partition is evicted, unchanged",
        "a file is there again after it was deleted",
    ),
    "savepoints": (
        "a savepoint is taken",
        "a savepoint is restored",
        "a saver dies",
    ),
    "forks": (
        "a checkpoint is forked",
        "a fork goes on where one has died",
    ),
    "rewrites": (
        "a rewrite is finished",
        "a rewrite is refused where one was cut short",
        "a rewriter dies",
        "a rewriter stands still until its version is gone",
    ),
    "followers": (
        "a follower answers",
        "a follower goes on to another run",
        "a process of a follower dies or stands still",
    ),
    "lookups": (
        "a version is recorded by a reader of storage",
        "a version is looked up again in storage",
        "a job ends because its version was made again",
        "the record of a version that is gone is removed, as its error says",
    ),
}
"""The situations that each kind of run must reach."""
_NAMES = frozenset(name for names in MUST_BE_REACHED.values() for name in names)


def sometimes(name: str) -> None:
    """Record that the run has reached a situation that a search must reach."""
    if name not in _NAMES:
        raise KeyError(f"{name!r} is not declared in MUST_BE_REACHED.")
    scheduling.active.reached[name] += 1


def told(reached: Mapping[str, int]) -> Iterator[str]:
    """Give a line for each of them with its count."""
    for kind, names in MUST_BE_REACHED.items():
        yield from (f"{reached.get(name, 0):>8}  {kind}: {name}" for name in names)


def never_reached(reached: Mapping[str, int]) -> list[str]:
    """Return those that never came about."""
    return sorted(name for name in _NAMES if not reached.get(name))
