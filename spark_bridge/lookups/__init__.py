"""Lookups across queries: the rows of a DataFrame, enriched with another query's state."""
