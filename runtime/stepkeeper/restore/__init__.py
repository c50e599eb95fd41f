"""Restore checkpoints: the ranks agree on a commit, and each reads the parts that it needs. Every block is verified."""
