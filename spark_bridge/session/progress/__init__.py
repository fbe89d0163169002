"""The progress of a query, batch by batch: checkpoints, operators, metrics, traces."""
