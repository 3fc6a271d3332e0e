"""Records of loans, and of serving during them."""
