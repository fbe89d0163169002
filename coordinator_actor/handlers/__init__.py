"""The answers to the messages: each file here has those of one topic, and the registries that they share."""
