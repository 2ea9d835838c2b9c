"""`gagar bench`: how fast the parts are on this machine. There are no thresholds, and no test looks at a time."""
