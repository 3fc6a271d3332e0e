"""Lending of serving engines' time and memory to rollouts, within a proven latency bound.

The modules here and in `traffic` are pure rules without clock, files or processes, for simulator and executor. `sim`
lends in simulated time, `backend` on real devices; `records`, `pages` and `cli` serve both. The core does not import
this package; it finds the additions that `offers` lists.
"""
