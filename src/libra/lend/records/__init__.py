"""Records of loans, and of what serving engines did meanwhile."""
