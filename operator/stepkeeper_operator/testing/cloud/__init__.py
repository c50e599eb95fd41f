"""A cloud in memory."""
