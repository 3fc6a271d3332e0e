"""Lending: what a serving engine can spare for rollouts, and the bound that it keeps.

Everything here is pure: no clock, no files, no processes. Simulator, executor and emulator ask the same objects.
"""
