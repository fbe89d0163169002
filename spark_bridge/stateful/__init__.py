"""Processors with state of their own (``transform_with_state``): what users write, and the work of their tasks."""
