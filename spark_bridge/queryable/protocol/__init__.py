"""The wire protocol of queries: messages, frames, connections of clients, and the reads behind a server."""
