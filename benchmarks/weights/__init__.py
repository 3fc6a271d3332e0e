"""Cost of sending weights: exact deltas between versions of a model that is trained here, and a slow link."""
