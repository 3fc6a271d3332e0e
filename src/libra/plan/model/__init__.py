"""The allocation problem as exact models: CP-SAT, and an integer program that checks it."""
