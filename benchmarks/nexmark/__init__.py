"""Nexmark's queries about state, by this project's operators and by Spark's own, side by side."""
