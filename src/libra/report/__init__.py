"""What a person sees: pages, charts, timelines, tables, the live display."""
