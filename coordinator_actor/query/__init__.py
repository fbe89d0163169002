"""One registered run of a query: its versions, its running batch, the owners of its partitions, what is removed
when.
"""
