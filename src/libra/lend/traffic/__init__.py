"""Traffic of serving engines: its load, the certified envelope of loads, and its forecast."""
