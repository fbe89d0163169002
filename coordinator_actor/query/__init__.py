"""One registered run of a query: versions, running batch, owners of partitions, and what is removed when."""
