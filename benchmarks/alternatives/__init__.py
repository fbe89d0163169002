"""The alternatives to this project: the same running count and sum in other engines, each in its own environment.

``given`` makes the input and the expected totals. ``contestants`` lists the contestants and their settings.
``environments`` makes their environments, ``programs`` runs in those, and ``running`` talks to such a program.
``turns`` runs the turns of a contestant, ``results`` compares their results, and ``table`` makes the table of the
report. The comparison is ``comparisons/alternatives.py``.
"""
