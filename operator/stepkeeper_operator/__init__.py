"""The operator: runs CheckpointedTrainingJobs on JobSets and records every committed step in their status."""
