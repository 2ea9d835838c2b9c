"""Tasks that others wrote: one module a format, each a loader that says what is wrong with a record and where."""
