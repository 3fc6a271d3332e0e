"""The executor: duties of workers, and transitions between allocations."""
