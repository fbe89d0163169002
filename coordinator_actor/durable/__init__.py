"""What storage keeps of a query beside its state: manifests, epochs, savepoint records, Spark's own commits."""
