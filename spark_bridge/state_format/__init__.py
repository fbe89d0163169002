"""The stored-state format: column families, column names, layouts and readers of stored rows."""
