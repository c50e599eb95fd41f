"""Control the cloud, unknown to the operator: when it has room, and when it takes the room back."""

from dataclasses import dataclass
from typing import Any

from tpuapi.remote import RemoteTpu

__all__ = ["Cloud"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    remote: RemoteTpu
    resource: dict[str, Any]
    """The manifest of the QueuedResource."""

    def take_room(self) -> None:
        """Let requests wait in the queue."""
        self._set_capacity(0)

    def make_room(self) -> None:
        """Let requests be granted."""
        self._set_capacity(None)

    def announce_maintenance(self, *, starts_in_s: float) -> None:
        """Announce a window for all machines, after which they are gone for good, as Spot machines are."""
        for node in self.remote.state()["nodes"]:
            self.remote.do(
                "announce_maintenance", node=node["name"], starts_in_s=starts_in_s, ends_in="PREEMPTED"
            )

    def names(self) -> list[str]:
        """Return the names of all that is in the cloud."""
        state = self.remote.state()
        return [found["name"] for kind in ("queued_resources", "nodes") for found in state[kind]]

    def _set_capacity(self, cores: int | None) -> None:
        accelerator = self.resource["spec"]["slices"]["accelerator"]
        family = {"v5e": "v5litepod"}.get(accelerator, accelerator)
        self.remote.do("set_capacity", accelerator=family, cores=cores)
