"""How the supervisor handles replies of Ray's dashboard, which is faked here. ``test_run.py`` uses a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import ray

from spark_bridge.cli.jobs import COMMAND_KEY, NAME_KEY, ClusterAwayError, JobRun, NotOursError, RayJobs


class Dashboard(ThreadingHTTPServer):
    """Answers with the status and the body that ``answers`` has for a method and a path; 404 for any other."""

    answers: dict[tuple[str, str], tuple[int, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert isinstance(self.server, Dashboard)
        status, body = self.server.answers.get((self.command, self.path), (404, "not there"))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with Dashboard(("127.0.0.1", 0), Handler) as server:
        server.answers = {("GET", "/api/version"): (200, {"ray_version": ray.__version__, "version": "4"})}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def job(number: int, name: str = "clicks", **more: Any) -> dict[str, Any]:
    metadata = {NAME_KEY: name, COMMAND_KEY: "python c.py"}
    return {"submission_id": f"{name}-{number}", "status": "RUNNING", "metadata": metadata, **more}


def jobs(dashboard: Dashboard) -> RayJobs:
    return RayJobs(dashboard.url, "clicks", {})


def test_the_newest_run_of_a_name_is_that_with_the_highest_number(dashboard: Dashboard) -> None:
    others = [job(99, "clicks-too"), {**job(50), "metadata": {}}, {"submission_id": None, "status": "RUNNING"}]
    failed = job(10, status="FAILED", driver_exit_code=-9, error_type="X", message="words")
    dashboard.answers["GET", "/api/jobs/"] = (200, [job(9), failed, *others])
    assert jobs(dashboard).newest() == JobRun(10, "FAILED", "python c.py", -9, "X", "words")


def test_missing_job_is_none_and_a_foreign_job_is_rejected(dashboard: Dashboard) -> None:
    assert jobs(dashboard).look(3) is None
    dashboard.answers["GET", "/api/jobs/clicks-3"] = (200, {**job(3), "metadata": {}})
    with pytest.raises(NotOursError, match="clicks-3 was not started by statestore run"):
        jobs(dashboard).look(3)


def test_a_head_that_cannot_take_jobs_yet_is_waited_for(dashboard: Dashboard) -> None:
    dashboard.answers["POST", "/api/jobs/"] = (500, "No available agent to submit job, please try again later.")
    with pytest.raises(ClusterAwayError, match="No available agent"):
        jobs(dashboard).submit(1, "python c.py")


def test_a_job_that_is_refused_is_not_tried_again(dashboard: Dashboard) -> None:
    dashboard.answers["POST", "/api/jobs/"] = (400, "no such runtime environment")
    with pytest.raises(NotOursError, match=r"does not take the job clicks-1: .*no such runtime environment"):
        jobs(dashboard).submit(1, "python c.py")


@pytest.mark.parametrize("status", [400, 500])
def test_job_started_by_another_supervisor_is_adopted(dashboard: Dashboard, status: int) -> None:
    dashboard.answers["POST", "/api/jobs/"] = (status, "Job with submission_id clicks-1 already exists.")
    dashboard.answers["GET", "/api/jobs/clicks-1"] = (200, job(1))
    jobs(dashboard).submit(1, "python c.py")


def test_failing_or_missing_dashboard_counts_as_no_cluster(dashboard: Dashboard) -> None:
    dashboard.answers["GET", "/api/jobs/clicks-1"] = (503, "later")
    with pytest.raises(ClusterAwayError, match="503"):
        jobs(dashboard).look(1)
    gone = RayJobs("http://127.0.0.1:1", "clicks", {})
    with pytest.raises(ClusterAwayError, match=r"127\.0\.0\.1:1"):
        gone.newest()
