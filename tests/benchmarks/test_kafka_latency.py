"""Which rates a turn of the comparison over Kafka reports as sustained."""

from __future__ import annotations

import pytest
from kafka_latency import Turn


def growing(first: float, last: float, probes: int = 1000) -> list[float]:
    return [first + (last - first) * i / (probes - 1) for i in range(probes)]


@pytest.mark.parametrize(
    ("turn", "is_sustained"),
    [
        (Turn(growing(1200.0, 1200.0)), True),
        (Turn(growing(800.0, 1800.0)), True),
        (Turn(growing(1200.0, 12_000.0)), False),
        (Turn([*growing(2000.0, 11_000.0, 333), *growing(11_000.0, 13_000.0, 667)]), False),
        (Turn(growing(1200.0, 1200.0), load_behind=0.6), False),
    ],
)
def test_a_rate_is_sustained_if_latency_does_not_grow(turn: Turn, is_sustained: bool) -> None:
    assert turn.is_sustained is is_sustained
