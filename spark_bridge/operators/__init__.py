"""Stateful operators as Spark users call them, and what they share: key columns, partitioning, windows, settings."""
