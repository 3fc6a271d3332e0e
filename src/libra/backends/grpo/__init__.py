"""Training replicas: one replica's step, what it publishes, and a membership that changes between steps."""
