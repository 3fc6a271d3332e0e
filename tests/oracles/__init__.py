"""Answers of their own that tests, and benchmarks, hold Libra's against."""
