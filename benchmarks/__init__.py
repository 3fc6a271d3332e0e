"""Benchmarks of Libra: `python -m benchmarks.NAME [--quick] [--json FILE]`.

Invariant: every number that the documentation quotes comes out of a module here, with the case it was measured in.
"""
