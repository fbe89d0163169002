"""Alternatives to this project: the same running count and sum in other engines, each in its own environment."""
