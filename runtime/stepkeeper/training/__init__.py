"""Decide and do what happens between two training steps: save, stop, or go on."""
