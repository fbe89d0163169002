"""A host process that is killed, suspended, or whose machine is cut off, as the coordinator sees it, without Ray.

The record of the coordinator is its log: why a lease has ended, and how long after the last heartbeat.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from coordinator_actor.coordinator_conf import CoordinatorConf
from tests.cluster.bare_bank import BareBank
from tests.lab.lab import Lab
from tests.spark_bridge.conftest import wait_until

# Otherwise: tests/coordinator_actor/handlers/test_suspected_hosts.py without processes, and tests/simulation.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark42_only, pytest.mark.slow]
HOSTS = (1, 2)
BEAT_SECONDS = 1.0
_LOST = re.compile(r"Host (\S+) is lost: .* \((\w+)\)\. .* last heartbeat ([\d.]+) s ago")


@pytest.fixture
def lab(make_lab: Callable[[int], Lab]) -> Lab:
    return make_lab(1 + len(HOSTS))


@pytest.fixture
def bank(lab: Lab) -> Iterator[BareBank]:
    made = BareBank(lab, HOSTS, CoordinatorConf.host_timeout, BEAT_SECONDS)
    made.bank.wait_for_more("answer", 5)  # with owners on both hosts
    yield made
    made.end()


def losses(bank: BareBank) -> list[tuple[str, str, float]]:
    """Return the losses that the coordinator has recorded: the machine's address, the reason, the last heartbeat."""
    return [(h.split("-")[1], why, float(age)) for h, why, age in _LOST.findall(bank.bank.log())]


def test_a_killed_process_is_given_up_as_its_machine_refuses_connections(lab: Lab, bank: BareBank) -> None:
    bank.signal_host(1, signal.SIGKILL)
    wait_until(lambda: losses(bank))
    ((address, why, age),) = losses(bank)
    assert (address, why) == (lab.addresses[1], "REFUSED")
    assert age < CoordinatorConf.silent_timeout
    bank.bank.wait_for_more("batch", 3)
    bank.bank.wait_for_more("answer", 3)
    assert bank.bank.lines("wrong") == []


def test_a_suspended_process_is_not_given_up_before_its_lease_is_over(lab: Lab, bank: BareBank) -> None:
    bank.signal_host(1, signal.SIGSTOP)
    try:
        wait_until(lambda: losses(bank))
    finally:
        bank.signal_host(1, signal.SIGCONT)
    ((address, why, age),) = losses(bank)
    assert (address, why) == (lab.addresses[1], "NO_HEARTBEAT")
    assert age >= CoordinatorConf.host_timeout
    bank.bank.wait_for_more("batch", 3)
    bank.bank.wait_for_more("answer", 3)
    assert bank.bank.lines("wrong") == []


def test_a_machine_that_is_cut_off_is_superseded_after_four_seconds(lab: Lab, bank: BareBank) -> None:
    cut = time.monotonic()
    lab.cut(1)
    wait_until(lambda: losses(bank))
    seconds = time.monotonic() - cut
    ((address, why, age),) = losses(bank)
    assert (address, why) == (lab.addresses[1], "SILENT")
    assert CoordinatorConf.silent_timeout <= age < CoordinatorConf.host_timeout, seconds
    bank.bank.wait_for_more("batch", 3)
    lab.mend(1)
    bank.bank.wait_for_more("answer", 3)
    assert bank.bank.lines("wrong") == []
