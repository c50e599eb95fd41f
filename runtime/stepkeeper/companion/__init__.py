"""Run the companion, a process beside the trainer that does all work that must not disturb training."""
