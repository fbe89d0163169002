"""The bank on the machines of a lab without Ray and Spark, so that a loss costs seconds.

Coordinator, hosts, their servers, tasks' and clients' ways to them, and storage are the real ones. What Spark's driver
does is played (``bank``), and messages to the coordinator come over a plain connection (``calls``).
"""
