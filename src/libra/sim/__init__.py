"""A discrete-event simulator of rollout engines with vLLM's scheduling rules, exact to the token."""
