"""The framework of the benchmark suite: it defines and runs comparisons, and reports their results.

``model`` is the data, ``ratios`` evaluates it, ``report`` and ``svg`` show it; all of them are pure. ``comparison``
defines a comparison, and ``runner`` runs each in its own process. The comparisons are in ``comparisons``.
"""
