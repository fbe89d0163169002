"""The framework of the suite: ``model`` is the data, ``runner`` runs comparisons, ``report`` shows the results."""
