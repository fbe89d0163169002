"""A client's way to the cluster: discovery, known operators, repeated attempts."""
