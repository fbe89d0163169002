"""How rows become the files of new state: two stages of tasks on Ray."""
