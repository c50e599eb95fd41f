"""Define the Kubernetes event that a controller creates for people."""

from dataclasses import dataclass

__all__ = ["ObjectEvent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEvent:
    """A Kubernetes event about an object, for people."""

    warning: bool
    reason: str
    message: str
