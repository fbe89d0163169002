"""Aggregate functions over Arrow arrays: what each keeps, how states are merged and read. No Spark, no state store."""
