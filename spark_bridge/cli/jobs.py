"""``statestore run``: run the program of a stream as a job of Ray, and start it again when it fails."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import requests
import typer
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from spark_bridge.cli.output import FAILED, complain

# Ray starts a program that is submitted as a job on its head node, and reports how the program ended; Ray itself never
# starts the program again, and systemd cannot see a driver on another machine. The doubling delay and the name of the
# limit are those of a Kubernetes Job (``backoffLimit``). Output, logs and environments of jobs are Ray's own.


T = TypeVar("T")

JOB_POLL_SECONDS = 1.0
"""Ray is asked once in this many seconds."""
FIRST_RESTART_DELAY = 1.0
MAX_RESTART_DELAY = 60.0
HEALTHY_SECONDS = 600.0
"""A run that took this long resets the count of consecutive failures."""
CLUSTER_SECONDS = 600.0
"""Timeout of a cluster that does not answer."""
STOP_SECONDS_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
JOB_STOP_SECONDS = 30
"""Ray kills a job this long after SIGTERM, unless the variable says otherwise; its own default is 3 s."""
STOP_SLACK = 30.0
"""Seconds beyond it until the supervisor stops waiting for the end of the job."""

JOB_SUCCEEDED, JOB_STOPPED, JOB_FAILED = "SUCCEEDED", "STOPPED", "FAILED"

ENDED_WELL, GAVE_UP, NOT_REACHED, STOPPED_ELSEWHERE = 0, 1, 2, 3
"""Exit codes; after a signal the code is 128 and its number, as in a shell."""


class ClusterAwayError(Exception):
    """Nothing that knows of jobs answers at the address of the cluster."""


class NotOursError(Exception):
    """The job belongs to another owner, or the cluster refuses the job."""


@dataclass(frozen=True)
class JobRun:
    """One run of the program, as Ray knows it.

    ``cause`` is Ray's name for the failure of the run, ``message`` Ray's further text. A negative ``exit_code`` is a
    signal.
    """

    number: int
    status: str
    command: str = ""
    exit_code: int | None = None
    cause: str | None = None
    message: str = ""

    @property
    def is_over(self) -> bool:
        return self.status in (JOB_SUCCEEDED, JOB_STOPPED, JOB_FAILED)


@dataclass(frozen=True)
class Patience:
    """Bounds of a supervisor. After ``backoff_limit`` consecutive failures nothing is started again."""

    backoff_limit: int = 20
    healthy_after: float = HEALTHY_SECONDS
    cluster_timeout: float = CLUSTER_SECONDS
    stop_timeout: float = JOB_STOP_SECONDS

    def delay(self, failures: int) -> float:
        """Return the seconds before the next start, after ``failures`` consecutive failures."""
        return float(min(FIRST_RESTART_DELAY * 2.0 ** min(failures - 1, 16), MAX_RESTART_DELAY))


class Stop:
    """The received signal. It ends every wait."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._set = threading.Event()

    def __call__(self, number: int, frame: object = None) -> None:
        """Take a signal. The next one of its kind ends the process at once."""
        self._signal = number
        self._set.set()
        signal.signal(number, signal.SIG_DFL)

    def sent(self) -> int | None:
        return self._signal

    def wait(self, seconds: float) -> None:
        self._set.wait(seconds)


@dataclass(eq=False, repr=False)
class Supervisor:
    """Keeps one program running. ``say`` receives a line for people at each event; ``run`` blocks until the end."""

    _jobs: RayJobs
    _command: str
    _patience: Patience
    _stop: Stop
    _say: Callable[[str], None]
    _clock: Callable[[], float] = time.monotonic
    _failures: int = 0

    def run(self) -> int:
        """Keep the program running; return the exit code of the supervisor.

        Raises ``NotOursError`` if a job of this name runs another command, or the cluster refuses the job, and
        ``ClusterAwayError`` if the cluster has not answered for too long.
        """
        number = self._begin()
        while True:
            began = self._clock()
            ended = self._await_end(number)
            if self._stop.sent() is not None:
                return self._end(number)
            if ended is not None and ended.status == JOB_SUCCEEDED:
                self._say(f"{self._jobs.named(number)} has ended by itself, without an error.")
                return ENDED_WELL
            if ended is not None and ended.status == JOB_STOPPED:
                self._say(f"{self._jobs.named(number)} was stopped from outside, and is not started again.")
                return STOPPED_ELSEWHERE
            took = self._clock() - began
            self._failures = 1 if took >= self._patience.healthy_after else self._failures + 1
            self._say(f"{self._jobs.named(number)} has ended after {_lasted(took)}: {why(ended)}.")
            if self._failures > self._patience.backoff_limit:
                self._say(
                    f"{self._failures} consecutive failures (--backoff-limit {self._patience.backoff_limit}); "
                    "nothing is started again. The state is in the checkpoint location."
                )
                return GAVE_UP
            delay = self._patience.delay(self._failures)
            self._say(
                f"Starting again in {delay:.0f} s (consecutive failure {self._failures}, "
                f"{self._patience.backoff_limit} are allowed); the stream continues from its checkpoint."
            )
            self._stop.wait(delay)
            if self._stop.sent() is not None:
                return self._end(number)
            number += 1
            self._submit(number)

    def _begin(self) -> int:
        newest = self._asked(self._jobs.newest)
        if newest is None or newest.is_over:
            number = 1 if newest is None else newest.number + 1
            if self._stop.sent() is None:
                self._submit(number)
            return number
        self._require_same(newest)
        self._say(
            f"{self._jobs.named(newest.number)} runs already; watching it. Its earlier output: "
            f"ray job logs {self._jobs.named(newest.number)}"
        )
        return newest.number

    def _submit(self, number: int) -> None:
        """Start a run, or find that another supervisor of this name was first."""
        self._asked(lambda: self._jobs.submit(number, self._command))
        run = self._asked(lambda: self._jobs.look(number))
        if run is not None:
            self._require_same(run)
        if self._stop.sent() is None:
            self._say(f"{self._jobs.named(number)} is started: {self._command}")
            self._jobs.follow(number)

    def _require_same(self, run: JobRun) -> None:
        if run.command != self._command:
            name = self._jobs.named(run.number)
            raise NotOursError(
                f"{name} runs already, by another command: {run.command!r}, not {self._command!r}. Stop it "
                f"(ray job stop {name}), or give this one another --name."
            )

    def _await_end(self, number: int) -> JobRun | None:
        """Wait until a run is over; None if the cluster does not know it any more, or a signal was received."""
        while self._stop.sent() is None:
            run = self._asked(lambda: self._jobs.look(number))
            if run is None or run.is_over:
                return run
            self._stop.wait(JOB_POLL_SECONDS)
        return None

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """Ask the cluster, as often as it takes until it answers; None if a signal comes first."""
        silent_since: float | None = None
        while True:
            try:
                answer = ask()
            except ClusterAwayError as error:
                now = self._clock()
                if silent_since is None:
                    silent_since = now
                    self._say(
                        f"No cluster answers; waiting for one up to {self._patience.cluster_timeout:.0f} s. A head "
                        f"without fault tolerance takes all its streams with it. {error}"
                    )
                if self._stop.sent() is not None:
                    return None
                if now - silent_since >= self._patience.cluster_timeout:
                    raise
                self._stop.wait(JOB_POLL_SECONDS)
                continue
            if silent_since is not None:
                self._say("The cluster answers again.")
            return answer

    def _end(self, number: int) -> int:
        sent, name = self._stop.sent() or signal.SIGTERM, self._jobs.named(number)
        self._say(f"{signal.Signals(sent).name}: stopping {name}.")
        try:
            self._jobs.stop(number)
            deadline = self._clock() + self._patience.stop_timeout + STOP_SLACK
            while (run := self._jobs.look(number)) is not None and not run.is_over:
                if self._clock() > deadline:
                    self._say(f"{name} does not end; see ray job status {name}.")
                    return NOT_REACHED
                time.sleep(JOB_POLL_SECONDS / 4)
        except ClusterAwayError as error:
            self._say(f"{name} may still run, because the cluster does not answer: {error} Later: ray job stop {name}")
            return NOT_REACHED
        self._say(f"{name} has ended; its state is in the checkpoint location.")
        return 128 + sent


def why(run: JobRun | None) -> str:
    """Return the reason why a run has failed. ``run`` is None if its cluster no longer knows it."""
    if run is None:
        return "the head of the cluster has died and with it all that ran there: the cluster that answers now is new"
    first_line = run.message.strip().partition("\n")[0].rstrip(".:")
    if run.exit_code is not None and run.exit_code != 0:
        killed = -run.exit_code if run.exit_code < 0 else run.exit_code - 128
        if 0 < killed <= max(signal.Signals):
            name = signal.Signals(killed).name if killed in list(signal.Signals) else f"signal {killed}"
            out_of_memory = " (manually, or by the system when memory ran out)" if killed == signal.SIGKILL else ""
            return f"the driver was killed by {name}{out_of_memory}"
        return f"the program has ended with exit code {run.exit_code}; its last lines say why"
    reason = {
        "JOB_SUPERVISOR_ACTOR_DIED": "the driver's machine, or Ray's process that supervises the driver, has died",
        "RUNTIME_ENV_SETUP_FAILURE": "its environment could not be made",
        "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "Ray has not started it in time",
        "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "no node could take it",
    }.get(run.cause or "")
    rays_message = f" (Ray: {first_line})" if first_line else ""
    return f"{reason or 'it failed'}{rays_message}"


def _lasted(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def run(
    program: Annotated[Path, typer.Argument(help="The Python program of the stream.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments; after -- if they begin with -.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Names the job; one program runs at a time under a name. Default: the file's.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            envvar="RAY_ADDRESS",
            help="The Ray cluster, as http://head:8265 or head:6379; default: the one on this machine.",
        ),
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Send this directory to the cluster, for a head on another machine. PROGRAM is in it.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Pass this environment variable to the program, with its value here; repeatable. "
            "NAME=VALUE sets another value, which every user of this machine can read in the process list: not for "
            "secrets.",
        ),
    ] = None,
    backoff_limit: Annotated[
        int, typer.Option(min=0, help="Consecutive failures after which nothing is started again.")
    ] = 20,
) -> None:
    """Run the program of a stream as a job of Ray, and start it again whenever it fails.

    The driver runs on the head. When it dies, by itself, with RayDP's master or with a head without fault
    tolerance, the program is started again after 1 s, 2 s, 4 s and so on up to 60 s, and the stream continues from its
    checkpoint. SIGINT and SIGTERM stop the job. If this command itself is killed, the job keeps running, and the same
    command watches it again.

    Exit codes: 0, the program ended by itself; 1, it failed too often in succession; 2, wrong arguments, or no cluster
    answers; 3, the job was stopped from outside; 130 or 143, SIGINT or SIGTERM came and the job has ended.

    Ray's commands do the rest: ray job logs, ray job status, ray job stop.

    Examples: statestore run my_stream.py;
    statestore run my_stream.py --name clicks -- --input s3://bucket/clicks;
    statestore run my_stream.py --address http://head:8265 --working-dir . --env DB_PASSWORD
    """
    name = name or program.stem
    try:
        command = command_of(program, arguments or [], working_dir)
        runtime_env = runtime_env_of(name, working_dir, env or [])
        stop_seconds = float(runtime_env["env_vars"][STOP_SECONDS_VARIABLE])
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(FAILED) from error
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    jobs = RayJobs(address, name, runtime_env)
    patience = Patience(backoff_limit, cluster_timeout=CLUSTER_SECONDS, stop_timeout=stop_seconds)
    try:
        code = Supervisor(jobs, command, patience, stop, _say).run()
    except (ClusterAwayError, NotOursError) as error:
        complain(str(error))
        code = FAILED
    sys.stdout.flush()
    raise typer.Exit(code)


def command_of(program: Path, arguments: list[str], working_dir: Path | None) -> str:
    """Return the command line of the job, for the shell on the head.

    Without ``working_dir`` the program runs in the current directory: relative paths mean the same. Raises
    ``ValueError`` if the program is not there.
    """
    if not program.is_file():
        raise ValueError(f"The program {program} does not exist (in {Path.cwd()}).")
    if working_dir is None:
        run_it = shlex.join([sys.executable, str(program.resolve()), *arguments])
        return f"cd {shlex.quote(str(Path.cwd()))} && exec {run_it}"
    try:
        inside = program.resolve().relative_to(working_dir.resolve())
    except ValueError as error:
        raise ValueError(f"The program {program} is not in --working-dir {working_dir}.") from error
    return f"exec {shlex.join(['python', str(inside), *arguments])}"


def runtime_env_of(name: str, working_dir: Path | None, env: list[str]) -> dict[str, Any]:
    """Return Ray's environment of the job.

    ``env`` has variables, each as ``NAME``, whose value is that of this process, or as ``NAME=VALUE``. Raises
    ``ValueError`` for a name or a variable that cannot be, without the value.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError(f"--name {name!r}: use letters, digits, '_', '.' and '-', 100 at most.")
    variables = {STOP_SECONDS_VARIABLE: str(JOB_STOP_SECONDS)}
    for pair in env:
        variable, equals, value = pair.partition("=")
        if not variable:
            raise ValueError("--env: the name before the '=' is missing. Give NAME or NAME=VALUE.")
        if not equals and variable not in os.environ:
            raise ValueError(f"--env {variable}: the environment of this command has no such variable; export it.")
        variables[variable] = value if equals else os.environ[variable]
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if working_dir is not None:
        runtime_env["working_dir"] = os.fspath(working_dir)
    return runtime_env


def _say(text: str) -> None:
    print(f"statestore run: {text}", file=sys.stderr, flush=True)


# The jobs of Ray that ``statestore run`` starts and watches, over the HTTP interface of Ray's dashboard.
#
# A job's id is ``<name>-<number>``: Ray takes an id only once, so of two supervisors of one name one starts the job,
# and both watch it.


NAME_KEY = "statestore_run"
COMMAND_KEY = "statestore_command"
HTTP_TIMEOUTS = (10.0, 60.0)
"""To connect, and for each part of an answer: a cut cable sends none. A job's files are uploaded in between."""
HTTP_OK, HTTP_NOT_FOUND = 200, 404
SERVER_FAILED = "status code 5"


class PatientClient(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client, with a bound for each request, which Ray's own does not have."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        response: requests.Response = super()._do_request(method, endpoint, timeout=HTTP_TIMEOUTS, **options)
        return response

    def ask(self, method: str, endpoint: str) -> requests.Response | None:
        """Return the answer to a request; None for "not found". Raises ``ClusterAwayError`` for other errors."""
        response = self._do_request(method, endpoint)
        if response.status_code == HTTP_NOT_FOUND:
            return None
        if response.status_code != HTTP_OK:
            raise ClusterAwayError(f"{method} {endpoint}: {response.status_code} {response.text[:500]}")
        return response


class RayJobs:
    """The runs of one name: run 1, 2 and so on. ``runtime_env`` is Ray's.

    Every method but ``follow`` and ``named`` raises ``ClusterAwayError``. ``address`` is that of the cluster
    (``http://head:8265``, ``head:6379``), None for the one on this machine.
    """

    def __init__(self, address: str | None, name: str, runtime_env: dict[str, Any]) -> None:
        self._address = address
        self._name = name
        self._runtime_env = runtime_env
        self._connected: PatientClient | None = None

    def newest(self) -> JobRun | None:
        """Return the run with the highest number; None if the cluster knows none."""
        answer = self._ask("GET", "/api/jobs/")
        jobs = [] if answer is None else [self._run(job) for job in answer.json() if self._is_ours(job)]
        return max(jobs, key=lambda run: run.number, default=None)

    def look(self, number: int) -> JobRun | None:
        """Return a run; None if the cluster does not know it. Raises ``NotOursError`` if it has another owner."""
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
            environment, job = dict(self._runtime_env), self.named(number)
            self._client().submit_job(entrypoint=command, submission_id=job, runtime_env=environment, metadata=metadata)
        except (ConnectionError, requests.RequestException) as error:
            self._away(error)
        except (AuthenticationError, RuntimeError, ValueError) as error:
            # Ray has no error class for an id that is taken, nor for a request that broke off after the start.
            if self.look(number) is not None:
                return
            if SERVER_FAILED in str(error):  # a head that has just started has no process yet that takes jobs
                self._away(error)
            raise NotOursError(f"Ray does not take the job {self.named(number)}: {error}") from error

    def stop(self, number: int) -> None:
        """Ask a run to end. Nothing happens if the cluster does not know it."""
        self._ask("POST", f"/api/jobs/{quote(self.named(number))}/stop")

    def follow(self, number: int) -> None:
        """Print the output of a run from its beginning, in a thread that ends with the run."""

        async def print_lines() -> None:
            async for lines in self._client().tail_job_logs(self.named(number)):
                sys.stdout.write(lines)
                sys.stdout.flush()

        def print_output() -> None:
            try:
                asyncio.run(print_lines())
            except Exception as error:  # noqa: BLE001 - the supervisor reports the outcome of the run
                _say(f"The output of {self.named(number)} broke off ({error}): ray job logs -f {self.named(number)}")

        threading.Thread(target=print_output, name="statestore-output", daemon=True).start()

    def named(self, number: int) -> str:
        """Return the id of a run that Ray's own commands use."""
        return f"{self._name}-{number}"

    def _is_ours(self, job: dict[str, Any]) -> bool:
        metadata = job.get("metadata") or {}
        return metadata.get(NAME_KEY) == self._name and self._number(job) is not None

    def _number(self, job: dict[str, Any]) -> int | None:
        match = re.fullmatch(rf"{re.escape(self._name)}-(\d+)", job.get("submission_id") or "")
        return int(match[1]) if match else None

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
        """Return a client. The address is looked up again after each failure: a new head may have another port."""
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
