"""One partition: an engine at the completed version, the deltas over it, loading, older versions, snapshots."""
