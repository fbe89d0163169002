"""What a client may take of a server, and how much each has taken: admission, limits, statistics."""
