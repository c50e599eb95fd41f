"""Describe how tensors lie over ranks, as boxes of elements. Pure arithmetic; no torch tensors."""
