"""What a run is, as data: the configuration schema, its loader, and the shipped configurations.

Imports neither torch, ray nor vllm, so that `gagar config check` answers at once.
"""
