"""What ``statestore run`` does at each end of a run; the cluster is played. ``test_run.py`` has a real one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from spark_bridge.cli.jobs import (
    ENDED_WELL,
    GAVE_UP,
    JOB_FAILED,
    JOB_STOPPED,
    JOB_SUCCEEDED,
    STOPPED_ELSEWHERE,
    ClusterAwayError,
    JobRun,
    NotOursError,
    Patience,
    Stop,
    Supervisor,
    why,
)

COMMAND = "python clicks.py"
RUNNING = "RUNNING"
KILLED = JobRun(0, JOB_FAILED, exit_code=-9, cause="JOB_ENTRYPOINT_COMMAND_ERROR")
WELL = JobRun(0, JOB_SUCCEEDED, exit_code=0)


@dataclass
class PlayedCluster:
    """Runs end as ``ends`` says, one after the other, each after ``lasts`` seconds; time passes in waits alone.

    ``away`` are the seconds between which nothing answers, with all that was known lost behind them.
    """

    ends: list[JobRun]
    lasts: float = 5.0
    away: tuple[float, float] = (-1.0, -1.0)
    now: float = 0.0
    began: dict[int, float] = field(default_factory=dict)
    runs: dict[int, JobRun] = field(default_factory=dict)
    followed: list[int] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)

    def _answer(self) -> None:
        start, end = self.away
        if start <= self.now < end:
            raise ClusterAwayError("connection refused")
        if 0 <= end <= self.now:
            self.away = (-1.0, -1.0)
            self.runs.clear()

    def newest(self) -> JobRun | None:
        self._answer()
        return self.look(max(self.runs)) if self.runs else None

    def look(self, number: int) -> JobRun | None:
        self._answer()
        run = self.runs.get(number)
        if run is not None and not run.is_over and self.now >= self.began[number] + self.lasts:
            end = self.ends.pop(0) if self.ends else KILLED
            self.runs[number] = replace(end, number=number, command=run.command)
        return self.runs.get(number)

    def submit(self, number: int, command: str) -> None:
        self._answer()
        if number not in self.runs:
            self.runs[number] = JobRun(number, RUNNING, command)
            self.began[number] = self.now
            self.submitted.append(number)

    def stop(self, number: int) -> None:
        self._answer()
        if number in self.runs:
            self.runs[number] = replace(self.runs[number], status=JOB_STOPPED)

    def follow(self, number: int) -> None:
        self.followed.append(number)

    def named(self, number: int) -> str:
        return f"clicks-{number}"


@dataclass
class Played:
    cluster: PlayedCluster
    said: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    at_wait: Callable[[Stop], None] = lambda stop: None

    def supervise(self, **patience: float) -> int:
        played = self

        class PlayedStop(Stop):
            def wait(self, seconds: float) -> None:
                played.waits.append(seconds)
                played.cluster.now += seconds
                played.at_wait(self)

        self.stop = PlayedStop()
        options = Patience(**patience)  # type: ignore[arg-type]
        return Supervisor(self.cluster, COMMAND, options, self.stop, self.said.append, lambda: self.cluster.now).run()


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_program_that_ends_by_itself_is_not_started_again() -> None:
    played = Played(PlayedCluster([WELL]))
    assert played.supervise() == ENDED_WELL
    assert played.cluster.submitted == played.cluster.followed == [1]


def test_killed_driver_is_restarted_with_the_reason() -> None:
    played = Played(PlayedCluster([KILLED, KILLED, WELL]))
    assert played.supervise() == ENDED_WELL
    assert played.cluster.submitted == [1, 2, 3]
    assert any("clicks-1 has ended after 5 s: the driver was killed by SIGKILL" in line for line in played.said)
    assert any("Starting again in 2 s (consecutive failure 2, 20 are allowed)" in line for line in played.said)


def test_backoff_doubles_to_a_minute_and_consecutive_failures_are_bounded() -> None:
    played = Played(PlayedCluster([]))
    assert played.supervise(backoff_limit=9) == GAVE_UP
    assert played.cluster.submitted == list(range(1, 11))
    assert [w for w in played.waits if w > 1] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert "10 consecutive failures" in played.said[-1]


def test_long_run_resets_the_failure_count() -> None:
    played = Played(PlayedCluster([KILLED] * 30 + [WELL], lasts=700.0))
    assert played.supervise(backoff_limit=1) == ENDED_WELL


def test_stopped_job_stays_stopped() -> None:
    played = Played(PlayedCluster([JobRun(0, JOB_STOPPED)]))
    assert played.supervise() == STOPPED_ELSEWHERE
    assert played.cluster.submitted == [1]


def test_a_head_that_comes_back_without_its_jobs_gets_the_program_again() -> None:
    played = Played(PlayedCluster([WELL], lasts=100.0, away=(30.0, 90.0)))
    assert played.supervise() == ENDED_WELL
    assert played.cluster.submitted == [1, 2]
    assert any("No cluster answers; waiting for one up to 600 s" in line for line in played.said)
    assert any("the head of the cluster has died" in line for line in played.said)


def test_a_cluster_that_stays_away_is_an_error() -> None:
    with pytest.raises(ClusterAwayError, match="connection refused"):
        Played(PlayedCluster([], away=(3.0, 1e9))).supervise(cluster_timeout=50.0)


def test_running_job_is_watched_and_not_restarted() -> None:
    cluster = PlayedCluster([WELL])
    cluster.submit(7, COMMAND)
    played = Played(cluster)
    assert played.supervise() == ENDED_WELL
    assert cluster.submitted == [7]
    assert cluster.followed == []  # what it has printed for weeks is not printed again
    assert "ray job logs clicks-7" in played.said[0]


def test_other_command_with_the_same_name_is_rejected() -> None:
    cluster = PlayedCluster([WELL])
    cluster.submit(2, "python other.py")
    with pytest.raises(NotOursError, match=r"'python other.py', not 'python clicks.py'.*\(ray job stop clicks-2\)"):
        Played(cluster).supervise()
    assert cluster.submitted == [2]
    cluster.stop(2)  # as the error says
    assert Played(cluster).supervise() == ENDED_WELL and cluster.submitted == [2, 3]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_is_in_the_exit_code(sent: signal.Signals) -> None:
    cluster = PlayedCluster([], lasts=1e9)

    def at_wait(stop: Stop) -> None:
        if cluster.now >= 20 and stop.sent() is None:
            stop(sent)

    played = Played(cluster, at_wait=at_wait)
    assert played.supervise() == 128 + sent
    assert cluster.runs[1].status == JOB_STOPPED
    assert signal.getsignal(sent) == signal.SIG_DFL  # the next one ends the supervisor at once


def test_a_signal_between_two_starts_starts_nothing_more() -> None:
    cluster = PlayedCluster([])
    played = Played(cluster, at_wait=lambda stop: stop(signal.SIGTERM) if cluster.now > 5 else None)
    assert played.supervise() == 128 + signal.SIGTERM
    assert cluster.submitted == [1]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (JobRun(1, JOB_FAILED, exit_code=137), "killed by SIGKILL (manually, or by the system when memory ran out)"),
        (JobRun(1, JOB_FAILED, exit_code=1), "exit code 1"),
        (JobRun(1, JOB_FAILED, exit_code=250), "exit code 250"),
        (JobRun(1, JOB_FAILED, cause="JOB_SUPERVISOR_ACTOR_DIED", message="Job supervisor died: x"), "machine"),
        (JobRun(1, JOB_FAILED, message="what Ray says\nmore"), "it failed (Ray: what Ray says)"),
        (None, "head of the cluster has died"),
    ],
)
def test_reason_is_readable(run: JobRun | None, words: str) -> None:
    assert words in why(run)
