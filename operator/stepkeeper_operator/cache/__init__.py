"""Keep in memory what this operator process knows of the cluster, and what the jobs reported."""
