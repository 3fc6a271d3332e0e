"""Worker processes: how they start, how their speed is limited, and how the controller communicates with them."""
