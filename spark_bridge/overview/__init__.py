"""One description of the system for command line, page, HTTP and tests: from a running cluster, or storage alone."""
