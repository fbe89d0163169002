"""The commits of tasks: which changelogs go to storage together, and their acknowledgement at the coordinator."""
