"""Weights on their way to engines that share no memory with a trainer: exact deltas, mirrors, relays."""
