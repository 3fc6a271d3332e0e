"""Output for people: pages, charts, timelines, tables, the live display."""
