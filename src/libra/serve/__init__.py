"""Libra as a server: a gateway in front of engines, and emulated engines."""
