"""What users get from a client: state variables as they look to users, in Python, Arrow, pandas, Polars, JSON."""
