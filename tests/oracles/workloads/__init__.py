"""The post-training runs that policies and planners are compared on.

Invariant: parameters were frozen before anything of Libra's own ran on them; a workload's digest changes with any of
its parameters, and with any token of its first groups.
"""
