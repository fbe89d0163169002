"""Providers loaded in a process: loading, maintenance, reports to a coordinator (Spark: object ``StateStore``)."""

import logging
import tempfile
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from backends import (
    FileStateStoreProvider,
    RocksDBStateStoreProvider,
    StateStore,
    StateStoreConf,
    StateStoreId,
    StateStoreProviderId,
)
from backends.exceptions import (
    InvalidStateStoreArgument,
    StoreClosedError,
    UnsupportedLocationError,
    VersionNotFoundError,
)
from backends.store import LoadedProviders, load_provider, loaded_providers
from tests.backends.providers.provider_cases import content
from tests.patience import HANG, PATIENCE

CONF = StateStoreConf(provider="file", fsync=False, maintenance_interval=3600, deltas_per_snapshot=2)


class FailingProvider(FileStateStoreProvider):
    """Its maintenance fails."""

    def do_maintenance(self):
        raise RuntimeError("maintenance failed on purpose")


class SlowProvider(FileStateStoreProvider):
    """A provider whose maintenance runs until the test ends it."""

    begun = threading.Event()
    end = threading.Event()
    rounds = 0

    def do_maintenance(self):
        type(self).rounds += 1
        self.begun.set()
        assert self.end.wait(HANG)
        super().do_maintenance()


class NoProvider:
    """No provider at all."""

    def __init__(self, store_id, conf):
        pass


class Answer:
    def __init__(self, to_unload):
        self.to_unload = to_unload

    def result(self):
        return self.to_unload


class Coordinator:
    """Records the reports it gets; answers as the test says."""

    def __init__(self):
        self.reports = []
        self.verified = []
        self.to_unload = []
        self.inactive = set()

    def __str__(self):
        return "the coordinator"

    def report_active_instance(self, provider_id, host, executor_id, other_provider_ids=()):
        self.reports.append((provider_id, host, executor_id, tuple(other_provider_ids)))
        return Answer(self.to_unload)

    def verify_if_instance_active(self, provider_id, executor_id):
        self.verified.append((provider_id, executor_id))
        return provider_id not in self.inactive


def conf_of(provider, **options):
    return StateStoreConf(
        provider=f"{provider.__module__}.{provider.__name__}", fsync=False, maintenance_interval=3600, **options
    )


@pytest.fixture
def provider_id(tmp_path):
    """Makes ids: one store per partition, one run unless another is named."""

    def of(partition=0, run="run"):
        return StateStoreProviderId(StateStoreId(str(tmp_path / "ck"), "op", partition), run)

    return of


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def loaded(coordinator):
    """Loaded providers of an executor that has a coordinator."""
    loaded = LoadedProviders(load_provider, lambda: coordinator, host="a-host", executor_id="7")
    yield loaded
    SlowProvider.end.set()
    loaded.stop()


@pytest.fixture
def process_wide():
    loaded_providers.stop()
    yield loaded_providers
    loaded_providers.stop()
    loaded_providers.use_coordinator(lambda: None)


@pytest.fixture
def slow():
    SlowProvider.begun.clear()
    SlowProvider.end.clear()
    SlowProvider.rounds = 0
    return SlowProvider


@pytest.fixture
def logged(caplog):
    """Return the registry's messages until now, with their levels; each is logged once."""
    caplog.set_level(logging.DEBUG, "backends.store")

    def told():
        messages = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "backends.store"]
        caplog.clear()
        return messages

    return told


def maintain(loaded):
    wait(loaded.do_maintenance(), timeout=PATIENCE)


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


OTHERS = set()
"""Threads that were there before the test: hosts of other modules, which the same process has run, have some too."""


@pytest.fixture(autouse=True)
def _others():
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def maintenance_threads():
    return [
        t
        for t in {*threading.enumerate()} - OTHERS
        if t.name.startswith(("state-store-maintenance", "statestore-maintenance"))
    ]


# -- loading -----------------------------------------------------------------------------------


def test_get_loads_a_provider_and_opens_any_of_its_versions(process_wide, provider_id):
    one = provider_id()
    assert not StateStore.is_loaded(one) and not StateStore.is_maintenance_running()
    for version in (-1, 1):
        with pytest.raises(VersionNotFoundError, match="only the empty version 0"):
            StateStore.get(one, version, CONF)
    store = StateStore.get(one, 0, CONF)
    assert StateStore.is_loaded(one) and StateStore.is_maintenance_running()
    store.put(b"a", b"1")
    assert store.get(b"a") == b"1", "on a store, get reads a value"
    assert store.commit() == 1
    assert content(StateStore.get(one, 1, CONF)) == {"a": "1"}
    assert content(StateStore.get(one, 0, CONF)) == {}
    StateStore.unload(one)
    StateStore.unload(one)
    assert not StateStore.is_loaded(one)
    with pytest.raises(StoreClosedError):
        store.get(b"a")
    again = StateStore.get(one, 1, CONF)
    again.put(b"a", b"2")
    assert again.commit() == 2
    reader = StateStore.get_read_only(one, 2, CONF)
    assert content(reader) == {"a": "2"}
    with pytest.raises(StoreClosedError, match="read-only"):
        reader.put(b"a", b"3")


def test_get_on_the_class_is_not_mistaken_for_reading_a_value(process_wide):
    for wrong in (b"a", "id", None, StateStoreId("ck", "op", 0)):
        with pytest.raises(InvalidStateStoreArgument, match=r"not a StateStoreProviderId.* get\(key\) is for a store"):
            StateStore.get(wrong, 0)
    with pytest.raises(InvalidStateStoreArgument, match="not a StateStoreProviderId"):
        StateStore.get_read_only(b"a", 0)
    assert not StateStore.is_maintenance_running()


def test_without_a_conf_the_provider_is_rocksdb(loaded, provider_id):
    loaded.get(provider_id(), 0).abort()
    assert isinstance(loaded._providers[provider_id()], RocksDBStateStoreProvider)


def test_a_restarted_query_creates_new_providers(loaded, provider_id):
    first, second = provider_id(run="run-1"), provider_id(run="run-2")
    store = loaded.get(first, 0, CONF)
    store.put(b"a", b"1")
    store.commit()
    assert content(loaded.get(second, 1, CONF)) == {"a": "1"}
    assert loaded.is_loaded(first) and loaded.is_loaded(second)
    assert loaded._providers[first] is not loaded._providers[second]
    loaded.unload(first)
    assert loaded.is_loaded(second) and content(loaded.get_read_only(second, 1, CONF)) == {"a": "1"}


def test_a_provider_is_loaded_by_its_import_path(loaded, provider_id):
    conf = StateStoreConf(provider="tests.backends.providers.third_provider.ThirdStateStoreProvider", fsync=False)
    store = loaded.get(provider_id(), 0, conf)
    store.put(b"a", b"1")
    store.commit()
    assert content(loaded.get_read_only(provider_id(), 1)) == {"a": "1"}
    assert type(loaded._providers[provider_id()]).__name__ == "ThirdStateStoreProvider"


def test_many_threads_share_one_provider(loaded, provider_id, coordinator):
    together = threading.Barrier(8)
    stores = []

    def get():
        together.wait()
        stores.append(loaded.get_read_only(provider_id(), 0, CONF))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == len(coordinator.reports) == 8
    assert len({id(store._reader._provider) for store in stores}) == 1
    assert len(maintenance_threads()) == 1


def test_a_provider_that_fails_to_load_is_refused_and_not_kept(loaded, provider_id):
    with pytest.raises(InvalidStateStoreArgument, match="which is not a StateStoreProvider"):
        loaded.get(provider_id(), 0, conf_of(NoProvider))
    with pytest.raises(InvalidStateStoreArgument, match="cannot be imported"):
        loaded.get(provider_id(), 0, StateStoreConf(provider="no.such.Provider"))
    elsewhere = StateStoreProviderId(StateStoreId("webhdfs://nn/ck", "op", 0), "run")
    with pytest.raises(UnsupportedLocationError):
        loaded.get(elsewhere, 0, CONF)
    assert not loaded.is_loaded(provider_id()) and not loaded.is_loaded(elsewhere)
    with load_provider(provider_id(), CONF) as provider:
        assert type(provider) is FileStateStoreProvider


# -- the coordinator ---------------------------------------------------------------------------


def test_every_use_is_reported_with_the_others_that_are_loaded(loaded, provider_id, coordinator):
    one, two = provider_id(0), provider_id(1)
    loaded.get(one, 0, CONF)
    loaded.get_read_only(two, 0, CONF)
    loaded.get(one, 0, CONF)
    assert coordinator.reports == [
        (one, "a-host", "7", ()),
        (two, "a-host", "7", (one,)),
        (one, "a-host", "7", (two,)),
    ]


def test_an_instance_that_the_coordinator_reports_as_moved_is_unloaded_at_once(loaded, provider_id, coordinator):
    one, two, three = provider_id(0), provider_id(1), provider_id(2)
    loaded.get(one, 0, CONF)
    loaded.get(two, 0, CONF)
    coordinator.to_unload = [one, provider_id(9)]
    store = loaded.get(three, 0, CONF)
    assert not loaded.is_loaded(one) and loaded.is_loaded(two) and loaded.is_loaded(three)
    assert list(store.iterator()) == []


def test_an_instance_that_is_inactive_is_unloaded_by_maintenance(loaded, provider_id, coordinator):
    one, two = provider_id(0), provider_id(1)
    for each in (one, two):
        loaded.get(each, 0, CONF)
    maintain(loaded)
    assert sorted(coordinator.verified, key=str) == [(one, "7"), (two, "7")]
    assert loaded.is_loaded(one) and loaded.is_loaded(two)
    coordinator.inactive.add(one)
    maintain(loaded)
    assert not loaded.is_loaded(one) and loaded.is_loaded(two)
    coordinator.inactive.clear()
    assert loaded.get(one, 0, CONF).version == 0


def test_an_inactive_instance_is_not_maintained(loaded, provider_id, coordinator, logged):
    loaded.get(provider_id(), 0, conf_of(FailingProvider))
    coordinator.inactive.add(provider_id())
    maintain(loaded)
    assert not loaded.is_loaded(provider_id())
    assert "WARNING" not in [level for level, _ in logged()]


def test_a_coordinator_that_does_not_answer_costs_the_instance(loaded, provider_id, coordinator, monkeypatch, logged):
    loaded.get(provider_id(), 0, CONF)
    provider = loaded._providers[provider_id()]
    logged()

    def fail(*args):
        raise ConnectionError("no answer")

    monkeypatch.setattr(coordinator, "verify_if_instance_active", fail)
    maintain(loaded)
    assert not loaded.is_loaded(provider_id())
    assert ("WARNING", f"Error managing {provider}, unloading state store provider") in logged()


def test_the_reference_is_fetched_once_and_again_after_stop_or_another_coordinator(provider_id, coordinator):
    fetched = []

    def fetch():
        fetched.append(1)
        return coordinator

    loaded = LoadedProviders(load_provider, fetch)
    loaded.get(provider_id(), 0, CONF)
    loaded.get(provider_id(), 0, CONF)
    maintain(loaded)
    assert len(fetched) == 1
    loaded.stop()
    loaded.get(provider_id(), 0, CONF)
    assert len(fetched) == 2 and coordinator.reports[-1][2] == "driver"
    other = Coordinator()
    loaded.use_coordinator(lambda: other, "b-host", "8")
    loaded.get(provider_id(), 0, CONF)
    assert other.reports == [(provider_id(), "b-host", "8", ())] and len(coordinator.reports) == 3
    loaded.stop()


def test_without_a_coordinator_all_instances_are_active(provider_id, logged):
    loaded = LoadedProviders(load_provider)
    loaded.get(provider_id(), 0, CONF)
    maintain(loaded)
    assert loaded.is_loaded(provider_id())
    loaded.stop()
    assert not [text for _, text in logged() if "Reported" in text or "Verified" in text or "Retrieved" in text]


def test_maintenance_does_not_unload_an_instance_during_its_load(loaded, provider_id, coordinator, monkeypatch):
    """The coordinator knows an instance only once it is reported."""
    coordinator.inactive.add(provider_id())
    report = coordinator.report_active_instance

    def report_after_a_round(*args):
        maintain(loaded)
        coordinator.inactive.clear()
        return report(*args)

    monkeypatch.setattr(coordinator, "report_active_instance", report_after_a_round)
    assert list(loaded.get(provider_id(), 0, CONF).iterator()) == []


def test_maintenance_does_not_unload_an_instance_during_its_report(loaded, provider_id, coordinator, monkeypatch):
    """As with ``StateStoreCoordinatorRef``, whose report returns at once: only its result says that it arrived."""
    coordinator.inactive.add(provider_id())

    class AnswerAfterARound(Answer):
        def result(self):
            maintain(loaded)
            coordinator.inactive.clear()
            return super().result()

    monkeypatch.setattr(coordinator, "report_active_instance", lambda *args: AnswerAfterARound([]))
    assert list(loaded.get(provider_id(), 0, CONF).iterator()) == []


# -- maintenance -------------------------------------------------------------------------------


def test_the_thread_maintains_loaded_instances(loaded, provider_id, tmp_path):
    conf = StateStoreConf(provider="file", fsync=False, maintenance_interval=0.01, deltas_per_snapshot=2)
    for version in range(4):
        store = loaded.get(provider_id(), version, conf)
        store.put(b"a", b"%d" % version)
        store.commit()
    eventually(lambda: list((tmp_path / "ck").rglob("*.snapshot")))
    assert loaded.is_maintenance_running()


def test_an_instance_that_fails_is_unloaded_and_the_others_stay(loaded, provider_id, tmp_path, caplog):
    good, bad = provider_id(0), provider_id(1)
    loaded.get(bad, 0, conf_of(FailingProvider))
    provider = loaded._providers[bad]
    for version in range(2):
        loaded.get(good, version, CONF).commit()
    maintain(loaded)
    assert loaded.is_loaded(good) and not loaded.is_loaded(bad)
    assert len(list((tmp_path / "ck").rglob("*.snapshot"))) == 1
    with pytest.raises(StoreClosedError):
        provider.latest_version()
    (warning,) = [r for r in caplog.records if r.name == "backends.store" and r.levelname == "WARNING"]
    assert warning.getMessage() == f"Error managing {provider}, unloading state store provider"
    assert "maintenance failed on purpose" in str(warning.exc_info[1])
    maintain(loaded)
    loaded.get(good, 2, CONF).commit()


def test_a_slow_upload_holds_up_neither_the_others_nor_the_next_round(loaded, provider_id, slow, tmp_path):
    loaded.get(provider_id(0), 0, conf_of(slow, maintenance_threads=2))
    loaded.do_maintenance()
    assert slow.begun.wait(PATIENCE)
    for version in range(2):
        loaded.get(provider_id(1), version, CONF).commit()
    begun = loaded.do_maintenance()
    assert len(begun) == 1, "the slow one is still at it"
    assert not wait(begun, timeout=PATIENCE).not_done
    assert slow.rounds == 1
    assert len(list((tmp_path / "ck").rglob("*.snapshot"))) == 1
    slow.end.set()
    eventually(loaded._maintained[provider_id(0)].done)
    maintain(loaded)
    assert slow.rounds == 2 and loaded.is_loaded(provider_id(0))


def test_an_instance_unloaded_in_the_middle_of_its_maintenance_does_not_fail(loaded, provider_id, slow, logged):
    loaded.get(provider_id(), 0, conf_of(slow))
    begun = loaded.do_maintenance()
    assert slow.begun.wait(PATIENCE)
    loaded.unload(provider_id())
    loaded.get(provider_id(), 0, CONF)
    slow.end.set()
    wait(begun, timeout=PATIENCE)
    assert loaded.is_loaded(provider_id()), "the new instance is not the one whose maintenance failed"
    assert "WARNING" not in [level for level, _ in logged()]


# -- stop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["rocksdb", "file"])
def test_stop_leaves_no_thread_and_no_directory(loaded, provider_id, tmp_path, monkeypatch, provider):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    conf = StateStoreConf(provider=provider, fsync=False, maintenance_interval=0.01, deltas_per_snapshot=1)
    for partition in range(2):
        loaded.get(provider_id(partition), 0, conf).commit()
        reader = loaded.get_read_only(provider_id(partition), 1, conf)
        assert list(reader.iterator()) == []
    maintain(loaded)
    assert len(list(temporary.iterdir())) == 2 and loaded.is_maintenance_running() and maintenance_threads()
    loaded.stop()
    assert not loaded.is_maintenance_running() and maintenance_threads() == []
    assert list(temporary.iterdir()) == []
    assert not loaded.is_loaded(provider_id(0)) and not loaded.is_loaded(provider_id(1))
    assert loaded.do_maintenance() == []
    loaded.stop()
    assert loaded.get(provider_id(0), 1, conf).version == 1
    assert loaded.is_maintenance_running()


def test_stop_waits_for_maintenance_under_way(loaded, provider_id, slow):
    loaded.get(provider_id(), 0, conf_of(slow))
    (begun,) = loaded.do_maintenance()
    assert slow.begun.wait(PATIENCE)
    threading.Timer(0.05, slow.end.set).start()
    loaded.stop()
    assert begun.done() and maintenance_threads() == []


# -- messages ----------------------------------------------------------------------------------


def test_messages_are_those_of_spark(loaded, provider_id, coordinator, logged):
    one, two = provider_id(0), provider_id(1)
    loaded.get(one, 0, CONF)
    first = loaded._providers[one]
    assert logged() == [
        ("INFO", "State Store maintenance task started"),
        ("DEBUG", "Getting StateStoreCoordinatorRef"),
        ("INFO", "Retrieved reference to StateStoreCoordinator: the coordinator"),
        ("INFO", f"Reported that the loaded instance {one} is active"),
        ("DEBUG", "The loaded instances are going to unload: "),
    ]
    coordinator.to_unload = [one, two]
    loaded.get(provider_id(2), 0, CONF)
    assert logged() == [
        ("INFO", f"Reported that the loaded instance {provider_id(2)} is active"),
        ("DEBUG", f"The loaded instances are going to unload: {one}, {two}"),
        ("INFO", f"Unloaded {first}"),
    ]
    maintain(loaded)
    assert logged() == [
        ("DEBUG", "Doing maintenance"),
        ("DEBUG", f"Verified whether the loaded instance {provider_id(2)} is active: True"),
    ]
    third = loaded._providers[provider_id(2)]
    coordinator.inactive.add(provider_id(2))
    maintain(loaded)
    assert logged() == [
        ("DEBUG", "Doing maintenance"),
        ("DEBUG", f"Verified whether the loaded instance {provider_id(2)} is active: False"),
        ("INFO", f"Unloaded {third}"),
    ]
    coordinator.to_unload = []
    loaded.get(two, 0, conf_of(FailingProvider))
    logged()
    failing = loaded._providers[two]
    maintain(loaded)
    assert logged()[-2:] == [
        ("WARNING", f"Error managing {failing}, unloading state store provider"),
        ("INFO", f"Unloaded {failing}"),
    ]
    loaded.stop()
    assert logged() == [("INFO", "StateStore stopped")]


def test_a_provider_is_named_with_its_store(provider_id):
    with load_provider(provider_id(3), CONF) as provider:
        location = Path(provider.id.checkpoint_location)
        assert str(provider) == (
            f"FileStateStoreProvider[StateStoreId[location={location}, operator=op, partition=3, store=default]]"
        )
