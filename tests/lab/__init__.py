"""Machines of a cluster on one computer: what a test cuts off, slows down, or kills is a machine of its own.

``Lab`` makes the machines, ``ray_nodes`` starts Ray on them, ``python -m tests.lab`` gives a person a prompt there.
"""
