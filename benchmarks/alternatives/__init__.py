"""What people would pick instead: the same running count and sum in other engines, each in an environment of its own.

``given`` makes the input and the expected totals, ``contestants`` says who takes part and with which settings,
``environments`` makes their environments, ``programs`` runs in those, ``running`` talks to such a program, ``turns`` is
the course of a contestant, ``results`` compares, ``table`` is what the report shows. The comparison is
``comparisons/alternatives.py``.
"""
