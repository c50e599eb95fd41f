"""Copy the state after one step into memory that the companion process can read."""
