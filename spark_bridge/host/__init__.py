"""The logic of a host, without Ray: grants, loading, commits, completed versions, reads, maintenance, savepoint exports."""
