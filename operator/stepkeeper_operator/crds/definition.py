"""Define what differs between the kinds whose CRDs are generated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepkeeper_operator.api.base import ApiModel
from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.api.v1alpha1.trainingjob import GROUP
from stepkeeper_operator.crds.schema import Schema

__all__ = ["Column", "ResourceDefinition", "keep_schema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that `kubectl get` prints."""

    name: str
    type: str
    path: str
    description: str = ""


def keep_schema(schema: Schema) -> Schema:
    """Return the schema as the types say it."""
    return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDefinition:
    """One kind of the API: its names, its types, its rules and its page."""

    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    model: type[ApiModel]
    """The type of the whole object. Its docstring is the description of the kind."""

    columns: tuple[Column, ...]
    rules: tuple[CelRule, ...]
    edit: Callable[[Schema], Schema] = keep_schema
    """Changes the schema where it has to differ from the types."""

    opaque: frozenset[str] = frozenset()
    """Paths of fields that others define: their inner fields aren't documented here."""

    page: Path
    """Page of the docs that lists the fields."""

    introduction: str
    """First paragraph of that page."""

    @property
    def full_name(self) -> str:
        """The name of the CRD."""
        return f"{self.plural}.{GROUP}"
