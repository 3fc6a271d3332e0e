"""Costs of engines, training, memory and transfers."""
