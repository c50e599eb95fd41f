"""Translate the states of the Cloud TPU API to the operator's. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState

__all__ = ["to_camel_case", "to_state"]

_STATES: Final = {
    state.value: state
    for state in QueuedResourceState
    if state not in {QueuedResourceState.PENDING, QueuedResourceState.GONE}  # without a cloud resource
}


def to_state(name: str) -> QueuedResourceState:
    """Convert the API's name of a queued resource's state."""
    return _STATES.get(to_camel_case(name), QueuedResourceState.UNKNOWN)


def to_camel_case(name: str) -> str:
    """Convert a name of the API to CamelCase: UNHEALTHY_MAINTENANCE to UnhealthyMaintenance.

    UNKNOWN(77) stays unchanged.
    """
    return name if "(" in name else "".join(part.capitalize() for part in name.split("_"))
