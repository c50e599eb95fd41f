"""Define the part of an object's metadata that the operator reads, for all kinds."""

from pydantic import Field

from stepkeeper_operator.api.base import StatusPart, Timestamp

__all__ = ["ObjectMeta"]


class ObjectMeta(StatusPart):
    """The part of metadata that the operator reads."""

    name: str
    namespace: str
    uid: str
    generation: int = 1
    resource_version: str = ""
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
