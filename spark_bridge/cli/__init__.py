"""The command line ``statestore``."""
