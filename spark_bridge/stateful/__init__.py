"""Stateful processors with PySpark 4.2's interface: state variables, timers, TTL, tester."""
