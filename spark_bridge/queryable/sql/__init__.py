"""SQL over operators: DuckDB with filters and columns pushed down."""
