"""The companion: a process beside the trainer that does all that must not disturb training.

It is started by exec, knows no torch, and shares the snapshot's memory; `client` is the trainer's end.
"""
