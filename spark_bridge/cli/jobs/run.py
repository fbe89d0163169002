"""``statestore run``: run the program of a stream as a job of Ray, and start it again when it fails."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spark_bridge.cli.jobs.supervision import ClusterAwayError, NotOursError, Patience, Stop, Supervisor
from spark_bridge.cli.output import FAILED, complain

STOP_SECONDS_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""How long Ray waits after SIGTERM before it kills a job; its own default is 3 s."""


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
            help="Gives the program this environment variable, with the value that it has here; again for more. "
            "NAME=VALUE gives another value, which every user of this machine can read in the process list: not for "
            "secrets.",
        ),
    ] = None,
    python: Annotated[str | None, typer.Option(help="The Python on the head. Default: this one.")] = None,
    backoff_limit: Annotated[
        int, typer.Option(min=0, help="Failures in a row after which nothing is started again.")
    ] = 20,
    healthy_after: Annotated[
        float, typer.Option(min=0.0, help="Seconds; a run that took at least this long ends the row of failures.")
    ] = 600.0,
    cluster_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for a cluster that does not answer.")
    ] = 600.0,
    stop_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds that the program has to end after SIGTERM, before it is killed.")
    ] = 30,
    output: Annotated[bool, typer.Option("--output/--no-output", help="Print what the program prints.")] = True,
) -> None:
    """Run the program of a stream as a job of Ray, and start it again whenever it fails.

    The driver runs on the head. When it dies, by itself, with RayDP's master or with a head that has no fault
    tolerance, the program is started again after 1 s, 2 s, 4 s and so on up to 60 s, and the stream goes on from its
    checkpoint. SIGINT and SIGTERM stop the job. If this command itself is killed, the job runs on, and the same command
    watches it again.

    Exit codes: 0, the program ended by itself; 1, it failed too often in a row; 2, asked wrongly, or no cluster
    answers; 3, somebody else stopped the job; 130 or 143, SIGINT or SIGTERM came and the job has ended.

    Examples: statestore run my_stream.py;
    statestore run my_stream.py --name clicks -- --input s3://bucket/clicks;
    statestore run my_stream.py --address http://head:8265 --working-dir . --env DB_PASSWORD
    """
    from spark_bridge.cli.jobs.ray_jobs import RayJobs

    name = name or program.stem
    try:
        command = command_of(program, arguments or [], working_dir, python)
        runtime_env = runtime_env_of(name, working_dir, env or [], stop_timeout)
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(FAILED) from error
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    jobs = RayJobs(address, name, runtime_env, follows=output)
    patience = Patience(backoff_limit, healthy_after, cluster_timeout, float(stop_timeout))
    try:
        code = Supervisor(jobs, command, patience, stop, _say).run()
    except (ClusterAwayError, NotOursError) as error:
        complain(str(error))
        code = FAILED
    sys.stdout.flush()
    raise typer.Exit(code)


def command_of(program: Path, arguments: list[str], working_dir: Path | None, python: str | None) -> str:
    """Return the command line of the job, for the shell on the head.

    Without ``working_dir`` the program runs here, where this command is called: relative paths mean the same. Raises
    ``ValueError`` if the program is not there.
    """
    if not program.is_file():
        raise ValueError(f"There is no program {program} (in {Path.cwd()}).")
    words = [python or ("python" if working_dir else sys.executable)]
    if working_dir is None:
        run_it = shlex.join([*words, str(program.resolve()), *arguments])
        return f"cd {shlex.quote(str(Path.cwd()))} && exec {run_it}"
    try:
        inside = program.resolve().relative_to(working_dir.resolve())
    except ValueError as error:
        raise ValueError(f"The program {program} is not in --working-dir {working_dir}.") from error
    return f"exec {shlex.join([*words, str(inside), *arguments])}"


def runtime_env_of(name: str, working_dir: Path | None, env: list[str], stop_timeout: int) -> dict[str, Any]:
    """Return Ray's environment of the job.

    ``env`` has variables, each as ``NAME``, whose value is that of this process, or as ``NAME=VALUE``. Raises
    ``ValueError`` for a name or a variable that cannot be, without the value.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError(f"--name {name!r}: use letters, digits, '_', '.' and '-', 100 at most.")
    variables = {STOP_SECONDS_VARIABLE: str(stop_timeout)}
    for pair in env:
        variable, equals, value = pair.partition("=")
        if not variable:
            raise ValueError("--env: there is no name before the '='. Give NAME or NAME=VALUE.")
        if not equals and variable not in os.environ:
            raise ValueError(f"--env {variable}: the environment of this command has no such variable; export it.")
        variables[variable] = value if equals else os.environ[variable]
    made: dict[str, Any] = {"env_vars": variables}
    if working_dir is not None:
        made["working_dir"] = os.fspath(working_dir)
    return made


def _say(text: str) -> None:
    """Print a line of the supervisor on stderr, apart from what the program prints."""
    print(f"statestore run: {text}", file=sys.stderr, flush=True)
