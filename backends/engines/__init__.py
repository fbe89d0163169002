"""Engines that hold one partition on a machine: RocksDB, and sorted maps in memory. The seam is ``engine.py``."""
