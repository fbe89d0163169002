"""``statestore doctor``: checks of a machine, of storage and of a cluster, each with what to do."""
