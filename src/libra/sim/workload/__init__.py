"""Workloads of engines: recorded, replayed or made from distributions."""
