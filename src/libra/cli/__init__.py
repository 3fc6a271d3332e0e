"""The `libra` command: a module for each of its verbs."""
