"""Who fulfils the executor's protocols: vLLM engines, the GRPO trainer, launchers, transport."""
