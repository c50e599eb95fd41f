"""Simulate a cluster in memory for tests of the operator: objects, and controllers that obey their manifests."""

from stepkeeper_operator.testing.cluster import FakeCluster
from stepkeeper_operator.testing.controllers import FakeControllers
from stepkeeper_operator.testing.messages import saved_message, termination_message, training_report
from stepkeeper_operator.testing.world import World, training_job

__all__ = [
    "FakeCluster",
    "FakeControllers",
    "World",
    "saved_message",
    "termination_message",
    "training_job",
    "training_report",
]
