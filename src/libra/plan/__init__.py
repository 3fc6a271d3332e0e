"""Planning: options with their prices, the exact optimisation model, and explanations of its answers."""
