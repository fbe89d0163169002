"""Machines of a cluster on one computer, each of which a test can cut off, slow down, or kill.

``Lab`` makes the machines, ``ray_nodes`` starts Ray on them, ``python -m tests.lab`` gives a person a prompt there.
"""
