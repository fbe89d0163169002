"""Records of a query in storage, beside its state: manifests, epochs, savepoint records, Spark's own commits."""
