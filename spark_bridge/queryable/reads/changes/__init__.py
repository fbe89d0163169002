"""The change feed: which keys each version has changed, and their values before."""
