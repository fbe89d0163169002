"""Aggregate functions over Arrow arrays: the state of each, merging and reading states. No Spark, no state store."""
