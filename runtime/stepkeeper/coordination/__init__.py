"""Coordinate the ranks of one training: exchange values, agree on a step, and prove that all see one root."""
