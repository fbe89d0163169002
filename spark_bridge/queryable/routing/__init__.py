"""Routing of requests to the owners of partitions, and their answers put together at one version."""
