"""Commands for a running cluster: what there is, logs, tokens, draining; and what serves a page, state, dashboards."""
