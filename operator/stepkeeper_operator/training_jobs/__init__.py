"""Reconcile CheckpointedTrainingJobs: observe the cluster, decide, and apply the decision."""
