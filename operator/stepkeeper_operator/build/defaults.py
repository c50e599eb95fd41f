"""Tell what a user wrote from what the API server added to it."""

from collections.abc import Mapping
from typing import Any

from stepkeeper_operator.api.template_defaults import TEMPLATE_DEFAULTS

__all__ = ["without_defaults"]


def without_defaults(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template without fields that have the API server's defaults.

    A CRD that gives another field a default shows it in templates that were written before.
    """
    pruned: dict[str, Any] = _prune(template, "")
    return pruned


def _prune(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        fields = ((name, f"{path}.{name}" if path else name, item) for name, item in value.items())
        return {
            name: _prune(item, below)
            for name, below, item in fields
            if below not in TEMPLATE_DEFAULTS or TEMPLATE_DEFAULTS[below] != item
        }
    if isinstance(value, list):
        return [_prune(item, f"{path}[]") for item in value]
    return value
