"""Checkpoint storage on a local disk, HDFS, S3, Google Cloud Storage, Azure or in memory, with create-if-absent."""
