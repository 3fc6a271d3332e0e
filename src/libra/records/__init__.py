"""What runs write down and reports read."""
