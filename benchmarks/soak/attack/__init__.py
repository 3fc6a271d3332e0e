"""Attacks on what Libra reads and on the ports that it opens: `python -m benchmarks.soak --attack`.

Invariant: every process that is attacked is an ordinary one of its own. An attack uses only what a stranger has: the
address, the name of the file, or a damaged copy. A row that cannot run here says so and is no pass.
"""
