"""Processors that keep state (``transform_with_state``): what users write, and the work of their tasks."""
