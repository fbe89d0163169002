"""State store providers that are used alone, and the registry of loaded providers with its maintenance."""
