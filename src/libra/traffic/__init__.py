"""What users ask of serving engines: how much, how much of it at a time, and how much is to be expected."""
