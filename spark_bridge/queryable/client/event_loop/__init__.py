"""The client for programs on an event loop."""
