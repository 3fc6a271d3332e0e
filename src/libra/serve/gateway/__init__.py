"""An OpenAI-compatible router in front of engines: a policy chooses the engine of each turn."""
