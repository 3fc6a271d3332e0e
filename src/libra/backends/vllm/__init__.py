"""Rollout engines: vLLM, stepped by Libra's own loop."""
