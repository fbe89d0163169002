"""Loading and unloading partitions: for tasks, as copies for readers and savepoints, and before a partition moves."""
