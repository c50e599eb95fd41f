"""Read each block once among all ranks of a restore, and send it to the ranks that need it."""
