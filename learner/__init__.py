"""Advantages, losses, packing, the DeepSpeed actor group, weight publishing and supervised warm-up."""
