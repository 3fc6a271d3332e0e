"""Libra inside other trainers. Each module imports its host framework, which is not a dependency of Libra."""
