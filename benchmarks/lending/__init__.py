"""Cost of lending to the users of a deployment, and its worth to rollouts."""
