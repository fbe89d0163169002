"""Savepoints: trigger, export, format and restore (Flink's savepoint coordinator)."""
