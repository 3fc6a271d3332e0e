"""Readers of configurations, family by family."""
