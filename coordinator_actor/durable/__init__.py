"""Records of a query in storage, next to its state: manifests, epochs, savepoint records, Spark's own commits."""
