"""The versions of a run: their files, manifests and recovery, and versions that other queries look up."""
