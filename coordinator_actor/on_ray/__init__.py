"""The coordinator as a Ray actor, and the ways to it through Ray. Only the modules of this package import Ray."""
