"""The Arrow Flight protocol between tasks and hosts: messages, client, errors on the wire, TLS."""
