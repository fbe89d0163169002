"""The client that users call: lookups, scans, watches, SQL, and the discovery of the cluster."""
