"""A host's part in savepoints: which rows it exports, and how much of a core that takes."""
