"""Tasks: what they are, where they come from, the sandboxes they run in and the verifiers that judge them."""
