"""The logic of a host: the partitions that it owns, their versions, commits and savepoint exports. No Ray."""
