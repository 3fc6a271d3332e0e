"""Plans that were simulated before they are promised: the planner proposes, whole runs in simulation decide."""
