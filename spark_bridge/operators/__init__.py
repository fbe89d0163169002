"""Stateful operators as Spark users call them, and their common parts: key columns, partitioning, windows, settings."""
