"""Run the companion, a process beside the trainer that does all work that must not disturb training.

The trainer starts it by exec. It doesn't import torch, and shares the snapshot's memory. `client` is the trainer's end.
"""
