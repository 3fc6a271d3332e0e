"""Prices beside published measurements: memory and pace of engines, and training rates.

Invariant: nothing is fitted here, and each case is priced by the code that prices a plan. A case that cannot be priced
is a row with its reason.
"""
