"""What one caller of the HTTP application may ask for at most."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HttpLimits(BaseModel):
    """Limits of one replica.

    Beyond them requests are answered 413 (too large) or 429 (too many), or end with 504 (too long).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(8 << 20, gt=0, description="Largest body of a request.")
    max_keys: int = Field(100_000, gt=0, description="Most keys of one lookup.")
    max_rows: int = Field(10_000_000, gt=0, description="Most rows of one scan.")
    scan_seconds: float = Field(300.0, gt=0, description="Longest time that a scan takes.")
    timeout: float = Field(
        10.0, gt=0, description="How long an answer is waited for while hosts move or restart, in seconds."
    )
    max_requests: int = Field(100, gt=0, description="Requests at once, scans included.")
    max_scans: int = Field(4, gt=0, description="Scans at once.")
