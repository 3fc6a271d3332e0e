"""What came of a simulation: columns, metrics and their definitions, files."""
