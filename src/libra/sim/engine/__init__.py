"""One engine: its scheduler, its memory, and the cost of its iterations."""
