"""Place the pods: node selectors, tolerations, and the grace period that the machines allow."""

from typing import Any, Final

from stepkeeper_operator.api.accelerators import ACCELERATORS
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob, PlacementSpec, Provisioning
from stepkeeper_operator.facts.queued_resource import QueuedMachines
from stepkeeper_operator.labels import (
    ACCELERATOR_LABEL,
    NOT_READY_TAINT,
    QUEUED_RESOURCE_UID_LABEL,
    SPOT_LABEL,
    TOPOLOGY_LABEL,
    TPU_RESOURCE,
    UNREACHABLE_TAINT,
)

__all__ = [
    "AUTOCHECKPOINT_GRACE_S",
    "SPOT_GRACE_S",
    "choose_grace_s",
    "limit_grace_s",
    "node_selector",
    "on_spot",
    "on_spot_machines",
    "tolerations",
]

SPOT_GRACE_S: Final = 15
"""Seconds that the kubelet of a Spot machine on GKE gives a pod, regardless of its grace period."""

AUTOCHECKPOINT_GRACE_S: Final = 300
"""Seconds that Cloud TPU waits for a training to save before maintenance, on nodes with autocheckpoint."""

_DEFAULT_GRACE_S: Final = 30
"""Kubernetes' own default."""

_RESERVATION_LABEL: Final = "cloud.google.com/reservation-name"
_EVICTING_OR_ANY: Final = frozenset({"NoExecute", "", None})
"""Effects of tolerations that decide how long a pod stays on a tainted node: NoExecute, or none, which means any."""


def on_spot(placement: PlacementSpec) -> bool:
    return placement.tpu is not None and placement.tpu.provisioning is Provisioning.SPOT


def node_selector(placement: PlacementSpec, machines: QueuedMachines | None) -> dict[str, str]:
    """Return the labels of the nodes that fit the placement. `machines` is the QueuedResource that it names.

    The uid is used because nodes of an earlier QueuedResource with the same name may still exist.
    """
    tpu = placement.tpu
    if tpu is None:
        return {}
    if machines is not None:
        return {QUEUED_RESOURCE_UID_LABEL: machines.uid}
    labels = {ACCELERATOR_LABEL: ACCELERATORS[tpu.accelerator].node_label, TOPOLOGY_LABEL: tpu.topology}
    if tpu.provisioning is Provisioning.SPOT:
        labels[SPOT_LABEL] = "true"
    elif tpu.provisioning is Provisioning.RESERVED and tpu.reservation_name is not None:
        labels[_RESERVATION_LABEL] = tpu.reservation_name
    return labels


def tolerations(
    placement: PlacementSpec, of_template: list[dict[str, Any]], *, unreachable_s: int, grace_s: int
) -> list[dict[str, Any]]:
    """Return the tolerations of the template plus those that the placement needs.

    A pod leaves an unreachable node after `unreachable_s` instead of Kubernetes' 300 s, unless the template names
    that taint. A node that shuts down is not ready while its pods still save, so those pods get more time.
    """
    added: list[dict[str, Any]] = []
    if placement.tpu is not None:
        added.append({"key": TPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if on_spot(placement):
        added.append({"key": SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    named = {each.get("key") for each in of_template if each.get("effect") in _EVICTING_OR_ANY}
    limits = {UNREACHABLE_TAINT: unreachable_s, NOT_READY_TAINT: max(unreachable_s, 2 * grace_s)}
    leaving = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": limit_s}
        for key, limit_s in limits.items()
        if key not in named
    ]
    # The first match counts: after a template's `operator: Exists` these would have no effect.
    return [*leaving, *of_template, *added]


def choose_grace_s(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> int:
    """Choose the grace period in the pods' manifests: the template's, or else as long as the machines wait."""
    of_template: int | None = job.spec.template["spec"].get("terminationGracePeriodSeconds")
    if of_template is not None:
        return of_template
    return AUTOCHECKPOINT_GRACE_S if machines is not None and machines.autocheckpoint else _DEFAULT_GRACE_S


def limit_grace_s(pod_grace_s: int, job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> int:
    """Return the effective grace period of a trainer, from the one in its pod's manifest."""
    if on_spot_machines(job, machines):
        return min(SPOT_GRACE_S, pod_grace_s)
    if machines is not None and machines.autocheckpoint:
        return min(AUTOCHECKPOINT_GRACE_S, pod_grace_s)
    return pod_grace_s


def on_spot_machines(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> bool:
    """Return True if the job runs on machines that the cloud takes away at a few seconds' notice."""
    return on_spot(job.spec.placement) or (machines is not None and machines.spot)
