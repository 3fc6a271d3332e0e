"""Parts of a run on one GPU: engines under updates, training, weights, joins, and a run that is killed and resumed.

Invariant: `--dry-run` makes the same calls with a tiny model on CPU slots; only devices, sizes and limits differ.
"""
