"""Serving the state of a checkpoint or savepoint from Ray actors, without Spark."""
