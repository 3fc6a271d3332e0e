"""The search for engines that serve requests within latency limits: the menu, a bound, simulation, and the results."""
