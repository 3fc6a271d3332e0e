"""Records that runs write and reports read."""
