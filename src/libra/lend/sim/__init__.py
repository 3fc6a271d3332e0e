"""Devices that serve and are lent, in simulated time."""
