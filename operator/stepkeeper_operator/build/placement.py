"""Place the pods: add node selectors, tolerations and chips to the template."""

from typing import Any, Final

from stepkeeper_operator.api.accelerators import ACCELERATORS
from stepkeeper_operator.api.v1alpha1.trainingjob import PlacementSpec, Provisioning, TPUPlacement
from stepkeeper_operator.facts import QueuedMachines
from stepkeeper_operator.labels import (
    ACCELERATOR_LABEL,
    NOT_READY_TAINT,
    QUEUED_RESOURCE_UID_LABEL,
    SPOT_LABEL,
    TOPOLOGY_LABEL,
    TPU_RESOURCE,
    UNREACHABLE_TAINT,
)

__all__ = ["node_selector", "on_spot", "tolerations"]

_RESERVATION_LABEL: Final = "cloud.google.com/reservation-name"
_EVICTING_OR_ANY: Final = frozenset({"NoExecute", "", None})
"""The effects of tolerations that say how long a pod stays."""


def on_spot(placement: PlacementSpec) -> bool:
    return placement.tpu is not None and placement.tpu.provisioning is Provisioning.SPOT


def node_selector(placement: PlacementSpec, machines: QueuedMachines | None) -> dict[str, str]:
    """Return the labels of the nodes that fit the placement. `machines`: the QueuedResource that it names.

    A uid names one QueuedResource and no other: nodes of an earlier one of the same name may still be there.
    """
    tpu = placement.tpu
    if tpu is None:
        return {}
    if machines is not None:
        return {QUEUED_RESOURCE_UID_LABEL: machines.uid}
    selector = {
        ACCELERATOR_LABEL: ACCELERATORS[tpu.accelerator].node_label,
        TOPOLOGY_LABEL: tpu.topology,
    }
    return selector | _provisioning_labels(tpu)


def tolerations(
    placement: PlacementSpec, given: list[dict[str, Any]], *, unreachable_s: int, grace_s: int
) -> list[dict[str, Any]]:
    """Return the template's tolerations plus those that the placement needs.

    A pod leaves an unreachable node after `unreachable_s` instead of Kubernetes' 300 s, unless the template names
    that taint. A node that shuts down says it is not ready while its pods still save, so those pods get longer.
    """
    added: list[dict[str, Any]] = []
    if placement.tpu is not None:
        added.append({"key": TPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if on_spot(placement):
        added.append({"key": SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    known = {each.get("key") for each in given if each.get("effect") in _EVICTING_OR_ANY}
    limits = {UNREACHABLE_TAINT: unreachable_s, NOT_READY_TAINT: max(unreachable_s, 2 * grace_s)}
    leaving = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": limit_s}
        for key, limit_s in limits.items()
        if key not in known
    ]
    # The first one that fits counts: after a template's `operator: Exists` these would say nothing.
    return [*leaving, *given, *added]


def _provisioning_labels(tpu: TPUPlacement) -> dict[str, str]:
    if tpu.provisioning is Provisioning.SPOT:
        return {SPOT_LABEL: "true"}
    if tpu.provisioning is Provisioning.RESERVED and tpu.reservation_name is not None:
        return {_RESERVATION_LABEL: tpu.reservation_name}
    return {}
