"""Queryable state: lookups, scans, SQL and change feeds of running queries (Flink's queryable state)."""
