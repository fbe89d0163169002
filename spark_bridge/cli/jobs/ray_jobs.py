"""The jobs of Ray that ``statestore run`` starts and watches, over the HTTP interface of Ray's dashboard.

A job's id is ``<name>-<number>``: Ray takes an id only once, so of two supervisors of one name one starts the job, and
both watch it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from typing import Any
from urllib.parse import quote

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from spark_bridge.cli.jobs.supervision import ClusterAwayError, JobRun, NotOursError

NAME_KEY = "statestore_run"
COMMAND_KEY = "statestore_command"
HTTP_TIMEOUTS = (10.0, 60.0)
"""To connect, and for each part of an answer: a cut cable sends none. A job's files are uploaded in between."""
ASK_AGAIN_SECONDS = 2.0
HTTP_OK, HTTP_NOT_FOUND = 200, 404
SERVER_FAILED = "status code 5"


class PatientClient(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client, with a bound for each request, which Ray's own does not have."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        response: requests.Response = super()._do_request(method, endpoint, timeout=HTTP_TIMEOUTS, **options)
        return response

    def ask(self, method: str, endpoint: str) -> requests.Response | None:
        """Return the answer to a request; None for what is not there. Raises ``ClusterAwayError`` for any other."""
        response = self._do_request(method, endpoint)
        if response.status_code == HTTP_NOT_FOUND:
            return None
        if response.status_code != HTTP_OK:
            raise ClusterAwayError(f"{method} {endpoint}: {response.status_code} {response.text[:500]}")
        return response


class RayJobs:
    """The runs of one name. ``runtime_env`` is Ray's; ``follows`` says whether output is printed.

    ``address`` is that of the cluster (``http://head:8265``, ``head:6379``), None for the one on this machine.
    """

    def __init__(self, address: str | None, name: str, runtime_env: dict[str, Any], *, follows: bool) -> None:
        self._address = address
        self._name = name
        self._runtime_env = runtime_env
        self._follows = follows
        self._connected: PatientClient | None = None

    def newest(self) -> JobRun | None:
        """Return the run with the highest number; None if the cluster knows none."""
        answer = self._ask("GET", "/api/jobs/")
        jobs = [] if answer is None else [self._run(job) for job in answer.json() if self._is_ours(job)]
        return max(jobs, key=lambda run: run.number, default=None)

    def look(self, number: int) -> JobRun | None:
        """Return a run; None if the cluster does not know it. Raises ``NotOursError`` if somebody else made it."""
        answer = self._ask("GET", f"/api/jobs/{quote(self.named(number))}")
        if answer is None:
            return None
        if not self._is_ours(job := answer.json()):
            raise NotOursError(
                f"The job {self.named(number)} was not started by statestore run; give this program another --name."
            )
        return self._run(job)

    def submit(self, number: int, command: str) -> None:
        """Start a run, unless there is one of that number. Raises ``NotOursError`` if the cluster refuses."""
        metadata = {NAME_KEY: self._name, COMMAND_KEY: command}
        try:
            self._client().submit_job(
                entrypoint=command,
                submission_id=self.named(number),
                runtime_env=dict(self._runtime_env),
                metadata=metadata,
            )
        except (ConnectionError, requests.RequestException) as error:
            self._away(error)
        except (AuthenticationError, RuntimeError, ValueError) as error:
            # Ray has no error of its own for an id that is taken, nor for a request that broke off after the start.
            if self.look(number) is not None:
                return
            if SERVER_FAILED in str(error):  # a head that has just been started has nobody yet who takes jobs
                self._away(error)
            raise NotOursError(f"Ray does not take the job {self.named(number)}: {error}") from error

    def stop(self, number: int) -> None:
        """Ask a run to end. Nothing happens if the cluster does not know it."""
        self._ask("POST", f"/api/jobs/{quote(self.named(number))}/stop")

    def follow(self, number: int) -> None:
        """Print what a run prints, in a thread that ends with the run."""
        if self._follows:
            threading.Thread(target=self._print, args=(number,), name="statestore-output", daemon=True).start()

    def named(self, number: int) -> str:
        """Return the id of a run by which Ray's own commands know it."""
        return f"{self._name}-{number}"

    def _is_ours(self, job: dict[str, Any]) -> bool:
        made = job.get("metadata") or {}
        return made.get(NAME_KEY) == self._name and self._number(job) is not None

    def _number(self, job: dict[str, Any]) -> int | None:
        found = re.fullmatch(rf"{re.escape(self._name)}-(\d+)", job.get("submission_id") or "")
        return int(found[1]) if found else None

    def _run(self, job: dict[str, Any]) -> JobRun:
        return JobRun(
            number=self._number(job) or 0,
            status=str(job["status"]),
            command=job["metadata"].get(COMMAND_KEY, ""),
            exit_code=job.get("driver_exit_code"),
            cause=job.get("error_type"),
            message=job.get("message") or "",
        )

    def _client(self) -> PatientClient:
        """Return a client. The address is looked up anew after each failure: a new head may have another port."""
        if self._connected is None:
            self._connected = PatientClient(self._address)
        return self._connected

    def _ask(self, method: str, endpoint: str) -> requests.Response | None:
        try:
            return self._client().ask(method, endpoint)
        except AuthenticationError as error:
            raise NotOursError(f"The cluster does not let this program in: {error}") from error
        except (ConnectionError, RuntimeError, requests.RequestException) as error:
            self._away(error)
            raise AssertionError from error

    def _away(self, error: Exception) -> None:
        self._connected = None
        raise ClusterAwayError(f"{error}") from error

    def _print(self, number: int) -> None:
        """Print the output of a run. Where the connection breaks, go on after what is printed already."""
        printed = 0
        while True:
            passed = 0

            async def follow() -> None:
                nonlocal passed, printed
                async for lines in self._client().tail_job_logs(self.named(number)):
                    fresh = lines[max(0, printed - passed) :]
                    passed += len(lines)
                    printed = max(printed, passed)
                    sys.stdout.write(fresh)
                    sys.stdout.flush()

            try:
                asyncio.run(follow())
            except Exception:  # noqa: BLE001 - whatever it was: the supervisor says what became of the run
                time.sleep(ASK_AGAIN_SECONDS)
            try:
                run = self.look(number)
            except (ClusterAwayError, NotOursError):
                return
            if run is None or run.is_over:
                return
