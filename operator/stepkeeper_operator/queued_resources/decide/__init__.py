"""Decide what to do for one QueuedResource. Pure: nothing here sends requests."""
