"""Judge why an attempt ended, what that costs, and when the next one may start. Pure."""
