"""Engines, each of which holds one partition on a machine: RocksDB, and sorted maps in memory."""
