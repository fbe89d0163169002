"""Stateful operators as Spark users call them, and what they share: input, partitioning, windows, time."""
