"""``ProcessorTester``: unit tests of processors without a cluster."""
