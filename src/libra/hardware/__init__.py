"""GPUs and nodes, the shapes of models, and the division of a model over devices."""
