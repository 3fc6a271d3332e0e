"""Exact deltas between versions of weights, and copies of weights between nodes."""
