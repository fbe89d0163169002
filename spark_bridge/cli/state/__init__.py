"""Commands that read and change what is stored: state, checkpoints, savepoints. Most need no cluster."""
