"""A coordinator whose answers about locations a test chooses."""

from __future__ import annotations

import time

from coordinator_actor.exceptions import QueryEndedError as EndedError
from coordinator_actor.exceptions import UnknownOperatorError as UnknownError
from coordinator_actor.messages import HostInfo, KvStateLocationOracle, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import HostUnavailableError


class Source:
    """A coordinator whose answers a test chooses; counts how often it is asked."""

    def __init__(self) -> None:
        self.fetched = 0
        self.running: dict[str, KvStateLocationOracle] = {}
        self.ended: set[str] = set()
        self.away = False
        self.pause = 0.0
        self.suspected: list[str] = []

    def suspect_host(self, address: str) -> None:
        self._answer()
        self.suspected.append(address)

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        self._answer()
        for oracle in self.running.values():
            if query in (oracle.query_id, oracle.run_id):
                owners = oracle.owners(operator)
                spec = OperatorSpec(operator, len(owners), "schema")
                return OperatorLocation(oracle.query_id, oracle.run_id, None, spec, 64, 1, owners)
        if query in self.ended:
            raise EndedError(f"{query} has ended")
        raise UnknownError(f"No running query {query}")

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        self.fetched += 1
        self._answer()
        time.sleep(self.pause)
        of_run = next((oracle for oracle in self.running.values() if oracle.run_id == job_id), None)
        return self.running.get(job_id, of_run)

    def _answer(self) -> None:
        if self.away:
            raise HostUnavailableError("away")


def oracle_of(run: str, address: str = "ip:1", job: str = "q1", operator: str = "op") -> KvStateLocationOracle:
    host = HostInfo("h", "a", "", "n", "s", address)
    return KvStateLocationOracle.of(job, run, None, 64, 1, {operator: [host, host]})
