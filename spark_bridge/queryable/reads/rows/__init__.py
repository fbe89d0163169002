"""The rows of an answer: of single keys, of windows, of scans, and those that a condition selects."""
