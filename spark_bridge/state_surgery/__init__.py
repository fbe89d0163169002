"""Changes of stored state by hand, by keys and rows of users."""
