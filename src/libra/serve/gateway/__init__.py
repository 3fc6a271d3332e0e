"""An OpenAI-compatible router in front of engines: each turn goes where the policy says."""
