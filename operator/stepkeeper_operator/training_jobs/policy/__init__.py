"""Plan what follows: the end of the job, a wait, or the next start. Pure."""
