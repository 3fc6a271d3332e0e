"""Prices beside published measurements: memory of engines, training rates and parameters of models.

Invariant: nothing is fitted here, and each case is priced by the code that prices a plan. A case that cannot be priced
is a row with its reason.
"""
