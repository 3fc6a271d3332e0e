"""What a run drives: vLLM engines and the GRPO trainer, and the launchers and transport below them."""
