"""Values of users' state and rows: Python objects, pandas and Arrow columns, in both directions."""
