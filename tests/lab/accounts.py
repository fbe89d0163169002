"""The accounts of the bank: what each has at every version, known without the stream.

Batch N has the transfers ``N * TRANSFERS`` to ``(N + 1) * TRANSFERS``, and each is a function of its number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ACCOUNTS = 1009
"""A prime: the two accounts of a transfer are never the same, and all accounts come in turn."""
TRANSFERS = 2000
"""Transfers of a batch."""
OPERATOR = "accounts"


def postings(version: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the money of each account at a version, in whole units, and how many rows it has seen."""
    number = np.arange(version * TRANSFERS, dtype=np.int64)
    amount = number % 97 + 1
    money = np.zeros(ACCOUNTS, np.int64)
    rows = np.zeros(ACCOUNTS, np.int64)
    for account, sign in ((number * 7 % ACCOUNTS, -1), ((number * 7 + 1 + number % 503) % ACCOUNTS, 1)):
        np.add.at(money, account, sign * amount)
        np.add.at(rows, account, 1)
    return money, rows
