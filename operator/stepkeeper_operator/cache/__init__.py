"""Keep the known objects of the cluster and the jobs' reports in memory."""
