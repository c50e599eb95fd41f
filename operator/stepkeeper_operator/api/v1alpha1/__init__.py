"""Define version v1alpha1 of the API group stepkeeper.dev."""

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob

__all__ = ["CheckpointedTrainingJob"]
