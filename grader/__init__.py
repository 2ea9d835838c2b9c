"""Group grading: verdicts, their validation, rubric, tiers and factors, and the worker that asks the model."""
