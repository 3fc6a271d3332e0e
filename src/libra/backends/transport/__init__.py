"""What processes exchange: messages, and vectors in shared memory."""
