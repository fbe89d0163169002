"""The logic of a host, without Ray: grants, loading, commits, versions, reads, maintenance, savepoint exports."""
