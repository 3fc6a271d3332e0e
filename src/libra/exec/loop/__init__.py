"""The post-training loop: steps, decisions, and what is written down about them."""
