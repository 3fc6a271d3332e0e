"""Lending on real devices: tokens, grants, memory and agents, and the part of a run that borrows."""
