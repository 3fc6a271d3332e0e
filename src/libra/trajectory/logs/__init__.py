"""Logs that other frameworks and agents write, read as trajectories: one module a format, the table in `catalogue`."""
