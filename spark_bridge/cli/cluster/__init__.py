"""Commands for a running cluster: overviews, logs, tokens, draining, and serving the page, state and dashboards."""
