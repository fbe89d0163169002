"""Reads of state on its host, each at one version."""
