"""A stream of a million keys on the lab of machines: the time that it loses when machines join, leave and die."""
