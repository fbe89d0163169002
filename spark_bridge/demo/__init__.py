"""``statestore demo``: a year of flights replayed as a stream, its state queried during the run, then checked.

There are three processes: ``app`` (which the user starts: display and clean-up), ``stream`` (the Spark driver) and
``lookup`` (a query client). The two children send ``app`` their events as JSON lines (``events``).
"""
