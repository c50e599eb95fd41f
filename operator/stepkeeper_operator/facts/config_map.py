"""Read the ConfigMap that is mounted into a job's pods."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepkeeper_operator.facts.raw import RawObject, controller_uid, controlling_job

__all__ = ["ConfigMap", "read_config_map"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMap:
    """The ConfigMap that has the name of the job's ConfigMap, whoever made it."""

    owner_uid: str | None
    """Uid of the object that controls it."""

    owner_job: str | None
    """Name of the training job that controls it; a job of before can have had the same name."""

    data: Mapping[str, str]


def read_config_map(raw: RawObject) -> ConfigMap:
    """Read the facts of a ConfigMap object."""
    return ConfigMap(
        owner_uid=controller_uid(raw), owner_job=controlling_job(raw), data=raw.get("data") or {}
    )
