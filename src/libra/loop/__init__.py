"""The post-training run: episodes, batches, decisions, checkpoints."""
