"""State variables and timers of a processor, its handle, and how they stand in the store."""
