"""The state task in a PySpark worker: it takes rows, makes one commit, and then yields rows."""
