"""Lending: the time and memory that serving engines can spare for rollouts, and the bound that it keeps.

The modules here and `traffic` are pure rules: no clock, no files, no processes. Simulator and executor use the same
objects: `sim` is lending in simulated time, `backend` on real devices, with `records`, `pages` and `cli` of both. The
core knows none of them; it finds what `offers` names.
"""
