"""Checkpoints of one run: pending and completed, ids, statistics, snapshot lag (Flink's CheckpointCoordinator)."""
