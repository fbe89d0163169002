"""What users give to a client: keys, bounds of scans, conditions, isolation levels."""
