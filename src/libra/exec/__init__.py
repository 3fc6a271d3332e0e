"""The executor: who does what, and the transitions between allocations."""
