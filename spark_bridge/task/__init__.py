"""The state task in a PySpark worker: rows in, one commit, rows out."""
