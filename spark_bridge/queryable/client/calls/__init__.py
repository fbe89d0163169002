"""The calls of a client: lookups, windows, scans, differences, watches, descriptions."""
