"""What can be chosen, each option with its price."""
