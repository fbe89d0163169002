"""The micro-batch of a run that is under way, what holds it back, and what Spark has logged of it."""
