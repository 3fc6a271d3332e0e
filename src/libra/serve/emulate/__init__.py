"""Emulated engines: vLLM's HTTP interface with the simulator's timing, without a model."""
