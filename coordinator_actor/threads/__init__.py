"""The threads of the coordinator: which ones answer messages, wait for storage of queries, and end leases."""
