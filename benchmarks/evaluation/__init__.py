"""Experiments in simulation on what Libra is worth, with their tables and figures.

Invariant: a number on the page comes from a cell, and a cell that is run again on the same code gives it again.
"""
