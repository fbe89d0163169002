"""The answers of a host from its own partitions, each answer at one version."""
