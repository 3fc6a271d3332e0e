"""Pages of loans."""
