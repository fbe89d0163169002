"""The operator ``join``."""
