"""Decide what to do for a job from the observed facts. Pure: nothing here reads a clock or a cluster."""
