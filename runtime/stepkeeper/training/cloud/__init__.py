"""Watch what the cloud announces for this machine: a preemption, or a maintenance."""
