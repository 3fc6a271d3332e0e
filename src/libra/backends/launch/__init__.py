"""Worker processes: how they start, how fast they run, and how the controller speaks with them."""
