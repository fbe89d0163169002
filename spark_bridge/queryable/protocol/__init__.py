"""The wire protocol of queries: messages, frames, the client's connections, and the reads that a server answers
from.
"""
