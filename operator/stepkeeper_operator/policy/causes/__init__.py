"""Why an attempt ended."""
