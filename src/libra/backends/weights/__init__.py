"""Weights as parts of numbers: exact deltas, and copies between nodes."""
