"""The simulator against vLLM: its schedules step by step, and its times against engines that ran on GPUs."""
