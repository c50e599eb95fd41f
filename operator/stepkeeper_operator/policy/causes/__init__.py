"""Find why an attempt ended."""
