"""The machines of a session: a Ray cluster, Java, RayDP's master, and Spark's executors."""
