"""Readers of logs of other frameworks and agents, one module per format. `catalogue` lists them."""
