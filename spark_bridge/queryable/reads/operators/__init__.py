"""What a host knows of the operators that it answers for."""
