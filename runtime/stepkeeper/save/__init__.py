"""Turn the state of a training into a committed checkpoint."""
