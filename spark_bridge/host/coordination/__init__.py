"""What passes between a host and the coordinator: registration and heartbeat, grants, completed versions, orders."""
