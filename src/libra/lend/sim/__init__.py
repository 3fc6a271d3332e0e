"""Lent devices of servers, in simulated time."""
