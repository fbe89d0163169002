"""The tables that all handlers share: hosts, runs and instances."""
