"""Manual changes of stored state, by keys and rows of users."""
