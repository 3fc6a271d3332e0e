"""Which engines serve requests within latency limits: the menu, a bound, simulation, and what comes of them."""
