"""Requests to storage: sent, counted, repeated, hedged and slowed down."""
