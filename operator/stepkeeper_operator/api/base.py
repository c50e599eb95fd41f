"""Convert between Python values and the JSON of the API, for all resource types."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import PydanticCustomError

__all__ = ["BY_TYPE", "SET", "ApiModel", "Count", "ObjectMeta", "SpecPart", "StatusPart", "Timestamp"]

_CONFIG: Final = ConfigDict(
    frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
)

SET: Final[dict[str, JsonValue]] = {"x-kubernetes-list-type": "set"}
"""Schema of a list without duplicates."""

BY_TYPE: Final[dict[str, JsonValue]] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""Schema of a list whose items are identified by the field `type`, and have separate field owners."""


class ApiModel(BaseModel):
    """Base of all API types. Read a value with `model_validate(raw)`, write it with `to_raw()`."""

    model_config = _CONFIG

    def to_raw(self) -> dict[str, Any]:
        """Return plain JSON types under the API's camelCase names. Fields that are unset (None) are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SpecPart(ApiModel):
    """Base of the types that users write. Unknown fields are kept to be reported, and neither written nor compared."""

    model_config = _CONFIG | ConfigDict(extra="allow")

    union: ClassVar[tuple[str, ...]] = ()
    """Fields of which one has to be set. If none that this version knows is set, the part is unreadable."""

    several: ClassVar[bool] = False
    """True if more than one field of `union` may be set."""

    compared: ClassVar[tuple[str, ...]] = ()
    """The fields of a whole spec that are hashed. Another hash means that the objects made from it are out of date."""

    @model_validator(mode="after")
    def _check_union(self) -> Self:
        given = [name for name in self.union if getattr(self, to_snake(name)) is not None]
        if len(given) > 1 and not self.several:
            raise PydanticCustomError("members", "only one of {members}", {"members": ", ".join(given)})
        if self.union and not given and self.needs_member():
            unknown = ", ".join(self.model_extra or ())
            why = f", and this operator doesn't know {unknown}" if unknown else ""
            context = {"members": ", ".join(self.union), "why": why}
            raise PydanticCustomError("no_member", "none of {members} is given{why}", context)
        return self

    def needs_member(self) -> bool:
        """Return True if one of the fields of `union` has to be set here."""
        return True

    @model_serializer(mode="wrap")
    def _leave_unknown_fields_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name not in (self.model_extra or ())}

    def describe_unknown_fields(self) -> str:
        """Describe the fields of this spec that this version doesn't know; empty if there are none."""
        fields = ", ".join(f"spec.{path}" for path in self.unknown_fields())
        if not fields:
            return ""
        text = f"this operator doesn't know {fields} and ignores it: upgrade the operator, or remove it from the spec"
        if not self.hides_changes():
            return text
        return f"{text}. Until then it applies no change of {', '.join(f'spec.{name}' for name in self.compared)}"

    def hides_changes(self) -> bool:
        """Return True if hashes of this spec can't be compared: a newer operator hashes the unknown fields too."""
        return any(path.partition(".")[0] in self.compared for path in self.unknown_fields())

    def unknown_fields(self) -> Iterator[str]:
        """Yield the paths, relative to this part, of the fields that this version doesn't know."""
        yield from self.model_extra or ()
        for name, field in type(self).model_fields.items():
            value, alias = getattr(self, name), field.alias or name
            if isinstance(value, SpecPart):
                yield from (f"{alias}.{path}" for path in value.unknown_fields())
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    if isinstance(item, SpecPart):
                        yield from (f"{alias}[{index}].{path}" for path in item.unknown_fields())


class StatusPart(ApiModel):
    """Base of the types that the operator writes. Unknown fields, of a newer operator, are dropped."""

    model_config = _CONFIG | ConfigDict(extra="ignore")


def _to_unix_s(value: object) -> object:
    if isinstance(value, str):
        return int(datetime.fromisoformat(value).timestamp())
    return int(value) if isinstance(value, float) else value


def _to_rfc3339(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    int,
    BeforeValidator(_to_unix_s),
    PlainSerializer(_to_rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Whole Unix seconds in Python (fractions are cut off), RFC 3339 in the API."""

Count = Annotated[int, Field(ge=0)]
"""A count in a status. It has no upper bound: only the operator writes it."""


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
