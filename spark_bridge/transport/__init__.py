"""The Arrow Flight protocol between tasks and hosts: messages, client, error codec, TLS."""
