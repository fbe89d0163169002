"""HTTP over a query client: the application that ``deploy/state_api.py`` runs on Ray Serve.

It does not import Ray itself.
"""
