"""Tasks that agents are trained on."""
