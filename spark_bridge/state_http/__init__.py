"""HTTP over a query client: an application of Ray Serve. Only ``serve_app`` imports Ray."""

from backends.lazy_names import MissingPackageError, import_optional

for package in ("fastapi", "jinja2"):  # the second one for the page
    import_optional(package, "State over HTTP", MissingPackageError)
