"""Restore checkpoints: the ranks agree on a commit, and each reads what it needs of it. Every block is verified."""
