"""Describe how tensors are laid out over ranks, as boxes of elements. Pure arithmetic; no torch tensors."""
