"""Generated code-repair tasks in small git repositories."""
