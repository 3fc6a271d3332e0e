"""Schemas and readers of configuration files."""
