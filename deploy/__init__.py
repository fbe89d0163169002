"""Files for a cluster: how to start one, and the HTTP application that serves the state of its streams."""
