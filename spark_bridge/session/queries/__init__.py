"""The driver follows the queries of a session: they start, live by heartbeats, end, and are read on."""
