"""The operator ``deduplicate``."""
