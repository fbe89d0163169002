"""Traces by OpenTelemetry: which spans there are, and how processes agree on their ids. Imports nothing while off."""
