"""Trajectories in flight on engines that others run, shared by the gateway and by adapters inside trainers."""
