"""Names of resources: `projects/{project}/locations/{zone}/{collection}/{id}`."""

import re
from dataclasses import dataclass

from tpuapi.core.errors import invalid

ID_PATTERN = re.compile(r"[A-Za-z0-9_.~+%-]+")
"""The documented form of the ids of queued resources and nodes."""

QUEUED_RESOURCES = "queuedResources"
NODES = "nodes"
OPERATIONS = "operations"
RESERVATIONS = "reservations"

ANY_ZONE = "-"
"""In the parent of a list: all zones of the project."""

_LOCATION = re.compile(r"projects/([^/]+)/locations/([^/]+)")
_RESOURCE = re.compile(r"(projects/[^/]+/locations/[^/]+)/([^/]+)/([^/]+)")


@dataclass(frozen=True, slots=True)
class Location:
    """One zone of one project: the parent of every resource."""

    project: str
    zone: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0] or self.zone

    def name(self, collection: str, resource_id: str) -> str:
        return f"{self.path}/{collection}/{resource_id}"

    def holds(self, other: "Location") -> bool:
        """Say whether a list with this parent shows what is in `other`."""
        return self.project == other.project and self.zone in (other.zone, ANY_ZONE)


def parse_location(path: str, field: str = "parent") -> Location:
    """Read a parent.

    Raises:
        ApiError: It doesn't have the form; INVALID_ARGUMENT.
    """
    match = _LOCATION.fullmatch(path)
    if match is None:
        raise invalid(field, f"'{path}' is not of the form projects/*/locations/*")
    return Location(*match.groups())


def check_name(path: str, collection: str, field: str = "name") -> str:
    """Return the name of a resource of the collection, unchanged.

    Raises:
        ApiError: It doesn't have the form; INVALID_ARGUMENT.
    """
    match = _RESOURCE.fullmatch(path)
    if match is None or match.group(2) != collection:
        raise invalid(field, f"'{path}' is not of the form projects/*/locations/*/{collection}/*")
    return path


def check_id(value: str, field: str) -> str:
    """Return the id, unchanged.

    Raises:
        ApiError: It doesn't follow the documented pattern; INVALID_ARGUMENT.
    """
    if ID_PATTERN.fullmatch(value) is None:
        raise invalid(field, f"'{value}' does not follow ^{ID_PATTERN.pattern}$")
    return value
