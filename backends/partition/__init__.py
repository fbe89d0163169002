"""One partition: an engine at the completed version, the changes over it, loading, older versions, snapshots."""
