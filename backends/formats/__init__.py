"""Durable formats: changelogs, snapshots, manifests, and the walk along a chain of manifests."""
