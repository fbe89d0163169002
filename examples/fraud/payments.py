"""Payments of cards, some of them stolen: the load generator of the example."""

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

TOPIC, CARDS, STOLEN_CARDS, PAYMENTS_OF_A_THIEF = "payments", 20_000, 3, 60


@dataclass
class Payment:
    """A payment. A bank learns weeks later whether it is fraud: that is not in the topic."""

    card: int
    amount: float
    merchant: int
    ms: int
    is_fraud: bool

    def record(self) -> bytes:
        return json.dumps({name: value for name, value in asdict(self).items() if name != "is_fraud"}).encode()


def payments(per_second: int, seed: int = 1) -> Iterator[list[Payment]]:
    """Yield the payments of each tenth of a second; a thief pays ten times a second with one of three stolen cards."""
    rng = random.Random(seed)
    usual = defaultdict[int, float](lambda: rng.uniform(10, 80))
    stolen = [rng.randrange(CARDS) for _ in range(STOLEN_CARDS)] * PAYMENTS_OF_A_THIEF
    while True:
        now = int(time.time() * 1000)
        cards = [rng.randrange(CARDS) for _ in range(per_second // 10)]
        owners = [(card, max(1.0, rng.gauss(usual[card], usual[card] / 4)), False) for card in cards]
        thief = stolen.pop(rng.randrange(len(stolen)))
        if thief not in stolen:  # the card is blocked, and another one is stolen
            stolen += [rng.randrange(CARDS)] * PAYMENTS_OF_A_THIEF
        made = [*owners, (thief, rng.uniform(20, 200), True)]
        yield [Payment(card, round(amount, 2), rng.randrange(500), now, fraud) for card, amount, fraud in made]
