"""Keep what this operator process knows of the cluster and of the jobs' reports, in memory."""
