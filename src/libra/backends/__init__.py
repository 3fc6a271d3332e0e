"""Backends of a run: vLLM engines and the GRPO trainer, and the launchers and transport below them."""
