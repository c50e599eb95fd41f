"""Reconcile CheckpointedTrainingJobs: observe for the decision, and carry it out."""
