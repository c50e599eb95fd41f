"""Stacks of all threads of all ranks: asked for, or because a step takes far longer than those before it."""
