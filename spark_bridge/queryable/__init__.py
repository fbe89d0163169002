"""Queryable state: the servers in the hosts, the clients, and what they say to each other. Needs neither Ray nor Spark."""
