"""The executor: the duties of workers, and the transitions between allocations."""
