"""The Spark session on Ray: start and end, the streaming query listener, progress, settings, savepoints."""
