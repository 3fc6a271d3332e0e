"""Training replicas: the step of one replica, its publications, and a membership that changes between steps."""
