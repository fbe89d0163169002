"""The hosts of a session: started where its executors run, replaced and ended."""
