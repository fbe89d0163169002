"""The streams that the overview's tests look at."""

from tests.spark_bridge.overview.conftest import stream

__all__ = ["stream"]
