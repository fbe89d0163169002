"""Reads a query's state from its storage alone, without a coordinator: any retained version, or changes between two."""
