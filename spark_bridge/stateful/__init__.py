"""Arbitrary stateful processing of keyed rows: Spark 4's ``transformWithState`` on this state store."""
