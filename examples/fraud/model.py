"""The model on Ray Serve: it reads features of cards from the running stream, and learns from their numbers."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve

from ray_statestore import QueryableStateClient


@dataclass
class Scores:
    """Probabilities of fraud, the features and inputs behind them, their age, and how long reading them took."""

    probabilities: Any
    features: dict[str, list[Any]]
    inputs: Any
    age: float
    read_seconds: float


@serve.deployment(num_replicas=1, max_ongoing_requests=50, ray_actor_options={"num_cpus": 0})
class FraudModel:
    """A logistic regression. It knows nothing at first; labels of payments that it has scored teach it."""

    def __init__(self, view: str) -> None:
        self._view, self._client = view, QueryableStateClient.connect()
        self._weights = np.array([0.0, 0.0, 0.0, 0.0, -3.0])

    def score(self, cards: list[int], amounts: list[float]) -> Scores:
        """Score payments: one request reads the features of all their cards, at one version of the stream's state."""
        begun, rows = time.perf_counter(), self._client.features(self._view, cards)
        read_seconds, x = time.perf_counter() - begun, rows.to_numpy()
        sums = [np.log1p(x["payments"]), np.log1p(x["spent"]) / 4, np.log1p(x["merchants"])]
        inputs = np.column_stack([*sums, np.array(amounts) / (x["usual"] + 10), np.ones(len(cards))])
        return Scores(self._probabilities(inputs), rows.to_dict(), inputs, rows.age or 0.0, read_seconds)

    def learn(self, inputs: Any, is_fraud: Any) -> None:
        """Descend the gradient for payments whose labels are known, each kind with the same weight."""
        share = np.where(is_fraud, 1 / max(is_fraud.sum(), 1), 1 / max((~is_fraud).sum(), 1))
        for _ in range(50):
            self._weights -= 0.3 * inputs.T @ (share * (self._probabilities(inputs) - is_fraud))

    def _probabilities(self, inputs: Any) -> Any:
        return 1 / (1 + np.exp(-inputs @ self._weights))
