"""Clusters, pools, failures and telemetry. Knows nothing of reinforcement learning."""
