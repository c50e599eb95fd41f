"""Decide between two training steps whether to save, stop or continue."""
