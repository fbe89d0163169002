"""Row caches share a budget, give back what the process needs, and let the oldest rows go first."""

import threading

import pytest

from backends.engines.row_cache_table import EvenRows
from backends.host_memory import REQUESTS
from tests.backends.engines.cache_over_dict import MIB, Below, row_memory, used
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("same_hashes_each_time", "few_rows_are_kept")


def test_the_oldest_go_first_and_dead_rows_before_them():
    below = Below(200_000)
    hot = [b"hot %06d" % i for i in range(200)]
    below.put(dict.fromkeys(hot, b"x" * 50))
    below.get(hot)
    for i in range(300):  # each write makes a new row of each key, and the old ones dead
        below.put(dict.fromkeys(hot, b"%d" % i + b"x" * 50))
    below.num_read = 0
    assert below.get(hot) == [below.pairs[key] for key in hot] and below.num_read == 0
    cold = [b"cold %06d" % i for i in range(10_000)]
    for at in range(0, len(cold), 100):
        below.get(cold[at : at + 100])
    below.num_read = 0
    below.get(cold[-300:])
    assert below.num_read == 0
    below.get(hot)
    assert below.num_read == len(hot)


def test_more_than_fits_is_read_all_the_same():
    below = Below(50_000)
    below.pairs = {b"%08d" % i: b"v%d" % i for i in range(20_000)}
    keys = list(below.pairs)
    for _ in range(3):
        assert below.get(keys) == list(below.pairs.values())
    below.put(dict.fromkeys(keys, b"other"))
    assert below.get(keys) == list(below.pairs.values())
    below.pairs[b"large"] = b"x" * 100_000
    assert below.get([b"large"]) == [b"x" * 100_000]
    assert used(below.memory) <= 50_000


def test_bulk_loads_find_room_in_the_table():
    below = Below(64 * MIB)
    below.pairs = {b"%08d" % i: b"v" for i in range(50_000)}
    keys = list(below.pairs)
    below.get(keys)
    below.num_read = 0
    below.get(keys)
    assert below.num_read < 0.001 * len(keys)


def test_caches_share_a_budget():
    memory = row_memory(400_000)
    first, second, third = (Below(memory) for _ in range(3))
    for below in (first, second, third):
        below.pairs = {b"%08d" % i: b"v" * 20 for i in range(20_000)}
    keys = list(first.pairs)

    def fill(below, number):
        for at in range(0, number, 500):
            below.get(keys[at : at + 500])
        return below.cache.nbytes

    alone = fill(first, 20_000)
    assert alone > 200_000
    assert fill(second, 20_000) > 100_000  # first has more than its share, and makes room
    fill(first, 20_000)
    fill(third, 20_000)
    assert fill(third, 20_000) > 60_000
    assert used(memory) <= memory._row_room()
    assert first.get(keys) == second.get(keys) == third.get(keys) == list(first.pairs.values())
    for below in (first, second, third):
        below.cache.clear()
    assert used(memory) == 0
    assert fill(first, 20_000) == alone
    del first, below
    assert used(memory) == 0


def limit_room(memory, room):
    """Let the process need so much that row caches may have ``room`` bytes together, as long as the claim lives."""
    return memory.note(REQUESTS, memory._working - room)


def test_caches_give_back_what_the_process_needs():
    memory = row_memory(300_000)
    first, second = Below(memory), Below(memory)
    for below in (first, second):
        below.pairs = {b"%08d" % i: b"v" * 20 for i in range(20_000)}
    keys = list(first.pairs)

    def fill(below, number):
        for at in range(0, number, 500):
            below.get(keys[at : at + 500])
        return below.cache.nbytes

    assert fill(first, 1_000) < fill(second, 2_000) < 300_000
    requests = limit_room(memory, 300_000)
    assert first.cache.rows.count and second.cache.rows.count
    memory.resize(requests, requests.nbytes + 200_000)
    assert first.cache.rows.count and not second.cache.rows.count
    fill(second, 20_000)
    assert 0 < used(memory) <= 100_000
    memory.resize(requests, requests.nbytes + 100_000)
    assert used(memory) == 0
    fill(first, 1_000)
    assert used(memory) == 0 and first.get(keys) == list(first.pairs.values())


def test_a_cache_may_be_emptied_while_another_one_is_given_room(monkeypatch):
    """As by the garbage collector, which may let go of any stream, and the copy that it read, at any allocation."""
    memory = row_memory()
    first, second = Below(memory), Below(memory)
    keys = [b"%08d" % i for i in range(500)]
    first.get(keys)
    assert used(memory) > 0
    settle, emptied = memory._settle, []

    def collecting():
        settle()
        if not emptied:
            emptied.append(first.cache.nbytes)
            first.cache.clear()

    monkeypatch.setattr(memory, "_settle", collecting)
    thread = threading.Thread(target=second.get, args=(keys,), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and emptied and used(memory) == second.cache.nbytes


def test_the_work_of_a_cache_does_not_grow_with_the_number_of_the_others(monkeypatch):
    """A memory that asked each cache for its size would do that work here."""
    looks, nbytes = [], EvenRows.nbytes.fget
    monkeypatch.setattr(EvenRows, "nbytes", property(lambda rows: looks.append(rows) or nbytes(rows)))
    memory = row_memory()
    caches = [Below(memory) for _ in range(200)]
    keys = [b"%08d" % i for i in range(50)]
    for below in caches:
        below.pairs = dict.fromkeys(keys, b"value")
    num_looks = []
    for _ in range(6):
        for below in caches:
            looks.clear()
            below.get(keys)
            num_looks.append(len(looks))
        looks.clear()
        limit_room(memory, 300_000)
        num_looks.append(len(looks))
    assert 0 < max(num_looks) <= 5
    # Caches have been emptied for others, and no trace is left of them.
    held = [below.cache.nbytes for below in caches if below.cache.rows.count]
    assert 0 < len(held) < len(caches) and used(memory) == sum(held)
    assert len(memory._row_claims) == len(held) and len(memory._largest_rows) <= 2 * len(held) + 17
