"""The Ray actor around a host, with its Arrow Flight server for tasks and its metrics."""
