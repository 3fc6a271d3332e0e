"""What to do with the devices: the options with their prices, the exact model, and why its answer is what it is."""
