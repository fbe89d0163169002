"""How a process of the state store runs: its log, and its scheduling priority."""
