"""Generation: the engines, and the agents whose turns they make."""
