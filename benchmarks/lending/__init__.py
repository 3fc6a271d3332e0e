"""What lending costs the users of a deployment, and what it is worth to rollouts."""
