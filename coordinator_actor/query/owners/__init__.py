"""The owners of a run's partitions, and how they hear of completed versions."""
