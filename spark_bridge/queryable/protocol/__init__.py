"""The wire protocol of queries: messages, frames and client connections."""
