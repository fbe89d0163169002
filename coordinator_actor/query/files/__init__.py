"""The files of a run: those known to be in storage, and those that must not be removed."""
