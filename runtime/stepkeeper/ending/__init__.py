"""End a process of the training: notices, the last save, exit codes, and the termination message."""
