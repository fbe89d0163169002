"""The Spark session on Ray: start and attach, the streaming query listener, settings, savepoints."""
