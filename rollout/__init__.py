"""Trajectories: engines that sample them, the agent loop that makes them, the worker that runs it."""
