"""The options of a plan, with their prices."""
