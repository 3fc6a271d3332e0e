"""The outcome of a simulation: columns, metrics and their definitions, files."""
