"""HTTP over a query client: an application of Ray Serve. Only ``serve_app`` imports Ray."""
