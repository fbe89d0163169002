"""Durable formats (changelogs, snapshots, manifests), the lineage that manifests define, and what may be removed."""
