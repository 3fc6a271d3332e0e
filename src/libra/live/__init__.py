"""Trajectories under way on engines that somebody else runs: the gateway and adapters inside trainers share it."""
