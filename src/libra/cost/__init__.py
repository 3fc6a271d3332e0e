"""What engines, training, memory and transfers cost."""
