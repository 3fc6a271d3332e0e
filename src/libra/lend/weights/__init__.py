"""Weights on their way to engines that share no memory with a trainer: feeds, mirrors, relays."""
