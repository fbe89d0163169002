"""The limits of the HTTP application: how much a request may ask for, and how many requests run at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class HttpLimits(BaseModel):
    """Limits of one replica.

    A request beyond a limit is answered 413 (too large), 429 (too many), 408 (body too slow) or 504 (answer takes too
    long).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: Annotated[int, Field(gt=0, description="Largest body of a request.")] = 8 << 20
    body_seconds: Annotated[float, Field(gt=0, description="Within which the body of a request must have come.")] = 30.0
    max_keys: Annotated[int, Field(gt=0, description="Most keys of one lookup.")] = 100_000
    max_lookup_bytes: Annotated[int, Field(gt=0, description="Largest answer of one lookup, as Arrow has it.")] = (
        64 << 20
    )
    max_rows: Annotated[int, Field(gt=0, description="Most rows of one scan.")] = 10_000_000
    scan_seconds: Annotated[float, Field(gt=0, description="Longest time that a scan takes.")] = 300.0
    timeout: Annotated[
        float, Field(gt=0, description="How long an answer is waited for while hosts move or restart, in seconds.")
    ] = 10.0
    max_requests: Annotated[int, Field(gt=0, description="Requests at once, scans included.")] = 100
    max_scans: Annotated[int, Field(gt=0, description="Scans at once.")] = 4
    max_sql_rows: Annotated[int, Field(gt=0, description="Most rows of one SQL statement.")] = 1_000_000
    sql_seconds: Annotated[float, Field(gt=0, description="Longest time that a SQL statement takes.")] = 60.0
    max_sql: Annotated[int, Field(gt=0, description="SQL statements at once.")] = 2
    sql_memory_bytes: Annotated[
        int, Field(ge=64 << 20, description="Memory of all SQL statements together; each may use its share of max_sql.")
    ] = 1 << 30
    sql_threads: Annotated[int, Field(gt=0, description="Threads of one SQL statement.")] = 2
    sql_temp_bytes: Annotated[
        int, Field(ge=0, description="Temporary files of all SQL statements together, on the replica's disk.")
    ] = 0
    max_watches: Annotated[
        int, Field(gt=0, description="Watches at once; each counts as a request as long as it is open.")
    ] = 32
    heartbeat_seconds: Annotated[
        float, Field(gt=0, description="After this many seconds without a change a watch sends a sign of life.")
    ] = 5.0
