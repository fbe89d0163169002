"""What a cluster needs: how to start one, and the state of its streams over HTTP."""
