"""The version of an answer: completed, prepared, or an older one that is loaded from storage."""
