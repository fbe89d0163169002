"""Look-ups of one key, and reads by queries next to the stream: their results, and that the stream is not affected."""

import threading
import time

import pyarrow as pa
import pytest

from backends.exceptions import InvalidStateStoreArgument, StoreClosedError, VersionNotFoundError
from tests.backends.partition.partition_steps import binary, commit, stage
from tests.effort import effort
from tests.patience import PATIENCE


def test_one_key_is_read_as_many_are(state):
    commit(state, {b"a": b"1", b"b": b"1", b"c": b"1"}, other={b"a": b"other"})
    commit(state, {b"a": b"2", b"b": None, b"d": b""})
    commit(state, {b"a": b"3", b"b": b"3"})
    stage(state, {b"a": None, b"e": b"4"}, only_here={b"a": b"x"})
    state.attempts.accept(4, "a")
    for version in (None, 1, 2, 3, 4):
        for family in ("default", "other", *(["only_here"] if version == 4 else [])):
            for key in (b"a", b"b", b"c", b"d", b"e", b"", b"zz"):
                expected = state.reads.get_many(binary(key), version, family)[0].as_py()
                assert state.reads.get_one(key, version, family) == expected
    assert [state.reads.get_one(b"a", v) for v in (1, 2, 3, 4)] == [b"1", b"2", b"3", None]
    assert state.reads.get_one(b"a", 3, head=state.head) == b"3"
    with pytest.raises(VersionNotFoundError, match=r"Version 5 .* held: 1, 2, 3, 4"):
        state.reads.get_one(b"a", 5)
    with pytest.raises(VersionNotFoundError, match="elsewhere"):
        state.reads.get_one(b"a", 3, head="elsewhere")
    with pytest.raises(InvalidStateStoreArgument, match=r"'nope'.*default, other"):
        state.reads.get_one(b"a", None, "nope")
    with pytest.raises(InvalidStateStoreArgument, match="only_here"):
        state.reads.get_one(b"a", 2, "only_here")
    deadline = time.monotonic() + PATIENCE
    while state._versions.readers:  # what version 4 will change may still be looked up in the background
        assert time.monotonic() < deadline, "a read that failed is still under way"
        time.sleep(0.001)
    state.close()
    with pytest.raises(StoreClosedError):
        state.reads.get_one(b"a")


def test_reads_by_queries_do_not_evict_rows_of_the_stream(state, monkeypatch):
    keys = [b"%03d" % i for i in range(40)]
    commit(state, dict.fromkeys(keys, b"1"))
    state.reads.get_many(binary(*keys))
    asked = []
    below = state._engine.get_many
    monkeypatch.setattr(state._engine, "get_many", lambda k, f, **how: asked.append(k) or below(k, f, **how))
    state.reads.get_many(binary(*keys[:20]), remember=False)
    state.reads.get_many(binary(*keys[::-1]), remember=False)
    state.reads.get_one(keys[3])
    asked.clear()
    commit(state, dict.fromkeys(keys[:30], b"2"))  # its before-images are those that the stream has read
    assert not asked
    assert state.reads.get_many(binary(*keys), 1).to_pylist() == [b"1"] * 40
    state.reads.get_many(binary(*keys), remember=False)
    commit(state, dict.fromkeys(keys, None))
    assert asked and state.metrics().num_keys == 0


class LateReaders(dict):
    """Calls ``before_register`` after a reader has read the completed version, and before it registers."""

    before_register = None

    def __setitem__(self, reader, layers):
        call, self.before_register = self.before_register, None
        if call is not None:
            call()
        super().__setitem__(reader, layers)


@pytest.mark.parametrize("read", ["one", "many"])
def test_a_version_that_completes_as_a_read_begins(state, read):
    commit(state, {b"a": b"1"})
    state._versions.readers = LateReaders()
    for version in (1, None):
        state._versions.readers.before_register = lambda: commit(state, {b"a": b"%d" % (state.version + 1)})
        found = (
            state.reads.get_one(b"a", version)
            if read == "one"
            else state.reads.get_many(binary(b"a"), version)[0].as_py()
        )
        assert found == (b"1" if version else b"3")
    assert not state._versions.readers


def test_single_reads_while_versions_complete(state):
    """Each version sets all keys to its number: a single read never returns an earlier or an unknown number."""
    keys = [b"%03d" % i for i in range(30)]
    commit(state, dict.fromkeys(keys, b"1"))
    failures, done = [], threading.Event()

    def keep_reading(first):
        last = 0
        while not done.is_set():
            for key in keys[first:]:
                least = state.version
                found = int(state.reads.get_one(key) or 0)
                if found < max(last, least):
                    failures.append((key, last, least, found))
                last = found
            values = state.reads.get_many(binary(*keys), remember=False).to_pylist()
            if len(set(values)) != 1:
                failures.append(values)
            time.sleep(0.0005)  # as between two requests; without a wait, other threads hardly run

    threads = [threading.Thread(target=keep_reading, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    last = effort(100, 1000)
    for version in range(2, last + 1):
        commit(state, dict.fromkeys(keys, b"%d" % version))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures and not state._versions.readers
    assert state.reads.get_many(pa.array(keys, pa.binary())).to_pylist() == [b"%d" % last] * 30
