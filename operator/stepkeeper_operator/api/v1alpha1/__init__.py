"""stepkeeper.dev/v1alpha1."""

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob

__all__ = ["CheckpointedTrainingJob"]
