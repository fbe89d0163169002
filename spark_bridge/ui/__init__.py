"""The page: what an operator of streams sees in a browser, server-rendered, of a cluster or a checkpoint."""
