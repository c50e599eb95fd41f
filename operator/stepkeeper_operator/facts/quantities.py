"""Bring the quantities of a pod template into one form: 1Gi is 1024Mi, and 100m is 0.1."""

from decimal import Decimal
from typing import Any, Final

from kubernetes.utils.quantity import parse_quantity

__all__ = ["normalize_quantities"]

_PLACES: Final = frozenset(
    {
        ("resources", "limits"),
        ("resources", "requests"),
        ("spec", "overhead"),
        ("emptyDir", "sizeLimit"),
        ("resourceFieldRef", "divisor"),
    }
)
"""Each place of a quantity, or of a map of them: its key, and the key of the object around it."""


def normalize_quantities(part: Any, around: str = "", key: str = "") -> Any:
    """Return a copy of a pod template, or of its `part` under `key`, that differs from another only if its pods do."""
    if isinstance(part, list):
        return [normalize_quantities(item, around, key) for item in part]
    if isinstance(part, dict):
        if (around, key) in _PLACES:
            return {name: _normalize(value) for name, value in part.items()}
        return {name: normalize_quantities(value, key, name) for name, value in part.items()}
    return _normalize(part) if (around, key) in _PLACES else part


def _normalize(quantity: Any) -> Any:
    try:
        number: Decimal = parse_quantity(str(quantity))  # type: ignore[no-untyped-call]  # the client's
        return str(number.normalize())
    except (ValueError, ArithmeticError):
        return quantity  # it is none: the API server refuses it
