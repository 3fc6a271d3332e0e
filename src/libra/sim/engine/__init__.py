"""One engine: its scheduler, its memory, and what its iterations take."""
