"""The answer to one request: admitted, read, and sent row by row."""
