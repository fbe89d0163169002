"""State store providers that are used alone: their stores, their manifests, their change feed."""
