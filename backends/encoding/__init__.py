"""Encode keys and values as bytes, whole Arrow columns at a time; key groups, schemas and their evolution."""
