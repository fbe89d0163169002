"""The work of a processor in a state task: its input, its state, its output."""
