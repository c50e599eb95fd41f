"""Plan what happens to the JobSet next."""
