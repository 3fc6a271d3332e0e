"""Traffic of serving engines: its load, the certified envelope of a load, and its forecast."""
