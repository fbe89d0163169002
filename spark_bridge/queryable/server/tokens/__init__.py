"""Who may ask: tokens, checked by signature or by the list of the coordinator."""
