"""Workloads of engines: recorded, replayed or generated from distributions."""
