"""Stacks of all threads of all ranks, dumped on request, or when a step takes far longer than earlier ones."""
