"""The wire protocol of queries: messages, frames, connections of clients, and the reads that a server answers
from.
"""
