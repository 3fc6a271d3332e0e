"""Libra inside other trainers. Each module needs its host, which it imports, and which Libra never requires."""
