"""Logs of other frameworks and agents, read as trajectories: one module a format, the table in `catalogue`."""
