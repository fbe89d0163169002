"""Durable formats (changelogs, snapshots, manifests), the lineage that manifests give, and what may be removed."""
