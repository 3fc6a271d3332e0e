"""Rollout engines: vLLM, stepped by our own loop."""
