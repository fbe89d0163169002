"""The client that users call: lookups, scans, watches, discovery of the cluster."""
