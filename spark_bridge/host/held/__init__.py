"""What a host holds: the loaded partitions and their runs, in memory."""
