"""A stream of a million keys on the lab of machines: what is lost of its time when machines come, leave and die."""
