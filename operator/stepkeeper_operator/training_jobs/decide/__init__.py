"""Decide what to do for a job from what was observed. Pure: nothing here reads a clock or a cluster."""
