"""Choice of plans by simulation: the planner proposes plans, and simulations of whole runs decide."""
