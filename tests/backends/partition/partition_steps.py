"""The steps of a version of one partition's state."""

import pyarrow as pa

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import ChangelogMeta, Changes

CONF = StateStoreConf(fsync=False)


def binary(*values):
    return pa.array(values, pa.binary())


def changes(pairs=None, **families):
    return Changes({n: SortedPairs.from_dict(p) for n, p in {"default": pairs or {}, **families}.items()})


def meta(version, base, attempt="a"):
    return ChangelogMeta("run", "op", 0, 1, version, attempt, base)


def stage(state, pairs, *, version=None, base="head", attempt="a", **families):
    version = state.version + 1 if version is None else version
    base = state.head if base == "head" else base
    return state.attempts.store_alone(meta(version, base, attempt), changes(pairs, **families))


def commit(state, pairs, **families):
    """All steps of one version, as a host takes them."""
    version = state.version + 1
    ref = stage(state, pairs, **families)
    state.attempts.accept(version, "a")
    state.complete(version, ref.path)
    return version, ref
