"""A long run of `libra run` under random faults, and what must hold of it in the end: `python -m benchmarks.soak`.

Invariant: the run is an ordinary one, in processes of its own; the soak only sends signals, keeps copies of its files
and reads them with code of its own.
"""
