"""Aggregate functions over Arrow arrays: kinds, kernels, grouping, moments, sketches, bounded lists. No Spark."""
