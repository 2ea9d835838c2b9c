"""The scheduler under a virtual clock: the production classes, with simulated pools, learner and engines."""
