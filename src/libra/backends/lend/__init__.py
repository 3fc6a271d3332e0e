"""Lending for real: the token that passes a device between two processes, and the scheduler that holds it."""
