"""Transport between processes: messages, and vectors in shared memory."""
