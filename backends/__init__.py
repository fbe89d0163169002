"""State stores: versioned maps of bytes, durable in a checkpoint location. Knows neither Ray nor Spark."""

from backends.conf import StateStoreConf
from backends.ids import StateStoreId, StateStoreProviderId
from backends.metrics import StateStoreMetrics

__all__ = ["StateStoreConf", "StateStoreId", "StateStoreMetrics", "StateStoreProviderId"]
