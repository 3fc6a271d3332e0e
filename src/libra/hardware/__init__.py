"""GPUs and nodes, the shapes of models, and how a model is spread over devices."""
