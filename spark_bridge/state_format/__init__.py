"""The stored-state format: column families, column names, layouts, and readers of stored rows.

Tasks, hosts, query clients, state data and savepoints use these definitions. Nothing here imports Spark or pandas.
"""
