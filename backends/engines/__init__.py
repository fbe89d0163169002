"""Engines: RocksDB, and sorted maps in memory. An engine holds one partition on a machine."""
