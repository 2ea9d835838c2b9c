"""Model endpoints for harnesses that are not ours: what they sample is recorded token by token."""
