"""Costs of requests to object storage, by a list of prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from backends.exceptions import InvalidStateStoreArgument
from backends.storage.sending.request_counts import RECEIVED, SENT

MONTH_SECONDS = 730 * 3600.0


@dataclass(frozen=True)
class Prices:
    """Dollars: of 1,000 requests by kind, and of a GiB that goes to storage or comes from there.

    The defaults are those of S3 standard in us-east-1, read by machines of the same region: transfer costs nothing
    there. What stored bytes cost is not in it.
    """

    put: float = 0.005
    get: float = 0.0004
    head: float = 0.0004
    list: float = 0.005
    delete: float = 0.0
    sent_gib: float = 0.0
    received_gib: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Return the prices that a text gives, such as ``put=0.0054,received_gib=0.09``; others are the defaults.

        Raises ``InvalidStateStoreArgument``.
        """
        names = [f.name for f in fields(cls)]
        given: dict[str, float] = {}
        for entry in filter(None, (e.strip() for e in text.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            try:
                dollars = float(value)
            except ValueError:
                dollars = math.nan
            if name not in names or not 0 <= dollars < math.inf:
                raise InvalidStateStoreArgument(
                    f"{entry!r} is no price: give {', '.join(f'{n}=' for n in names)} each with dollars of 0 or more "
                    "(for 1,000 requests, or for a GiB), separated by commas."
                )
            given[name] = dollars
        return cls(**given)

    def dollars(self, used: Mapping[str, int]) -> float:
        """Return the cost of requests by kind and of their bytes: see ``RequestCounts.at``."""
        requests = sum(
            used.get(kind, 0) * price
            for kind, price in (
                ("put", self.put),
                ("get", self.get),
                ("head", self.head),
                ("list", self.list),
                ("delete", self.delete),
            )
        )
        moved = used.get(SENT, 0) * self.sent_gib + used.get(RECEIVED, 0) * self.received_gib
        return requests / 1000 + moved / (1 << 30)

    def __str__(self) -> str:
        """Return the prices as ``parse`` reads them."""
        return ",".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self))


STANDARD = Prices()
