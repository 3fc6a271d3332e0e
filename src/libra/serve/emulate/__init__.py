"""Engines with vLLM's HTTP interface and the simulator's timing, without a model."""
