"""The frame of the benchmark suite: what a comparison is, how comparisons are run, and how results are reported.

``model`` is the data, ``ratios`` what follows from it, ``report`` and ``svg`` show it, all of them pure. ``comparison``
says what a comparison has to be, ``runner`` runs each in a process of its own. The comparisons are in ``comparisons``.
"""
