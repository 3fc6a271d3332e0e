"""Engines that answer over HTTP as vLLM does, with the simulator's timing and no model."""
