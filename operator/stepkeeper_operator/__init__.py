"""Run CheckpointedTrainingJobs on JobSets and record every committed step in their status."""
