"""Flatten a state tree into named tensors and values, and fill it again."""
