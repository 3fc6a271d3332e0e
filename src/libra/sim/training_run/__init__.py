"""Whole post-training runs: rollout, tools, routing, training, publication, and plans that change."""
