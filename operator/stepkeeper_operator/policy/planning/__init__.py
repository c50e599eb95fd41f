"""What happens to the JobSet next."""
