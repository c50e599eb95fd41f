"""Convert between Python values and the JSON of the API, for all resource types."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final

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
)
from pydantic.alias_generators import to_camel

__all__ = ["CONFIG", "SET", "ApiModel", "Count", "SpecPart", "StatusPart", "Timestamp", "map_by"]

CONFIG: Final = ConfigDict(
    frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
)


SET: Final[dict[str, JsonValue]] = {"x-kubernetes-list-type": "set"}
"""Schema of a list without duplicates."""


def map_by(key: str) -> dict[str, JsonValue]:
    """Return the schema of a list whose items have the field `key` as their identity and can be owned one by one."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class ApiModel(BaseModel):
    """Base of all types of the API. Read a value with `model_validate(raw)`, write it with `to_raw()`."""

    model_config = CONFIG

    def to_raw(self) -> dict[str, Any]:
        """Return plain JSON types under the API's camelCase names. Fields that are unset (None) are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class SpecPart(ApiModel):
    """Base of the types that users write.

    Unknown fields are kept to be named, and left out of what is written or compared.
    """

    model_config = CONFIG | ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _leave_unknown_fields_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name not in (self.model_extra or ())}

    def describe_unknown_fields(self) -> str:
        """Name the fields of this spec that this version doesn't know in a sentence; empty if there are none."""
        fields = ", ".join(f"spec.{path}" for path in self.unknown_fields())
        return fields and f"this operator doesn't know {fields}, and runs without: upgrade it, or remove them"

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
    """Base of the types that the operator writes.

    Unknown fields are dropped: a newer operator may have written them.
    """

    model_config = CONFIG | ConfigDict(extra="ignore")


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
"""A number of things in a status. It has no upper bound: the operator counts, nobody types it."""
