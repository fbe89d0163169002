"""Send one request to several hosts and combine their answers at one version (scatter-gather)."""
