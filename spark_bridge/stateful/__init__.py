"""Processors that keep state (``transform_with_state``): the classes for users, and the work of their tasks."""
