"""The page: a cluster or a checkpoint in a browser, rendered by the server, for the people who run streams."""
