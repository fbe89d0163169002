"""State as data: read any retained version from storage, as Arrow tables or Spark DataFrames."""
