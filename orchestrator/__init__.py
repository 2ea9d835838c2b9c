"""The scheduler, what it owns, and the command line."""
