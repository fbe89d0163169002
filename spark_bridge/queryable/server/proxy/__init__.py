"""The proxy in every host, which answers for all hosts: where state is, and requests that go on to other hosts."""
