"""``statestore run``: jobs of Ray that are watched, and started again."""
