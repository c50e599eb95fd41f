"""Find out what was changed since a JobSet was made, so that another one has to take its place."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.build import machines_hash, queue_labels, template_hash
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import EDITED
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["find_change"]

_REQUEUED: Final = "its labels kueue.x-k8s.io/* were changed, so its JobSet is made anew"


def find_change(
    job: CheckpointedTrainingJob, jobset: JobSet, observed: Observed, history: JobHistory
) -> str | None:
    """Find out what was changed since the JobSet was made, so that another one has to take its place."""
    if observed.held:
        return None
    if _is_outdated(job, jobset, observed):
        return EDITED
    # Kueue takes no other queue for what runs.
    idle = jobset.suspended and not history.is_running
    return _REQUEUED if idle and jobset.lacks_labels(queue_labels(job)) else None


def _is_outdated(job: CheckpointedTrainingJob, jobset: JobSet, observed: Observed) -> bool:
    """Tell whether the JobSet was built from another template, or for other machines than it could be resumed on.

    Without its machines that can't be known yet, nor while the spec hides changes. What runs continues, whatever is
    learnt of the machines meanwhile.
    """
    machines = observed.machines
    if job.spec.placement.queued_resource_name is not None and machines is None:
        return False
    if not job.spec.hides_changes() and jobset.template_hash != template_hash(job, machines):
        return True
    if machines is None or not (machines.ready and jobset.suspended):
        return False
    return jobset.machines_hash != machines_hash(machines)
