"""The operator ``aggregate``, with windows and sessions."""
