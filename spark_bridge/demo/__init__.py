"""``statestore demo``: a year of flights replayed as a stream, its state queried meanwhile, then checked.

Three processes: ``app`` (the one the user starts: display and clean-up), ``stream`` (the Spark driver) and
``lookup`` (a query client). The two children tell ``app`` what happens as JSON lines (``events``).
"""
