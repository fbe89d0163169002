"""The option ``--prices``: the costs of requests to storage."""

from __future__ import annotations

from typing import Annotated

import typer

PricesOption = Annotated[
    str,
    typer.Option(
        help="Dollars of 1,000 requests by kind, and of a GiB, such as put=0.0054,get=0.00043,received_gib=0.09. "
        "Others are those of S3 standard in us-east-1."
    ),
]
