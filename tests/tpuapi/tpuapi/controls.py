"""What tests do to a Cloud TPU service: they let time pass, and play the service's part and that of other people."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudQueuedResource
from tpuapi.life import Life
from tpuapi.nodes import Key, Timings, name_of
from tpuapi.rules import RefusedError


class Controls(Life):
    """Change what there is behind its users' backs. Names are ids or full names."""

    def __init__(
        self, clock: Callable[[], float] | None, timings: Timings | None, hosts_per_node: int | None
    ) -> None:
        self._stepped = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
        super().__init__(clock or (lambda: self._stepped), timings, hosts_per_node)
        self._failing_deletions: list[RefusedError] = []

    def step(self, seconds: float) -> None:
        """Let the time of its own pass."""
        self._stepped += seconds
        self.advance()

    def set_timings(self, **seconds: float) -> None:
        """Change how long things take that begin from now on; the names are those of Timings."""
        self.timings = replace(self.timings, **seconds)

    def set_capacity(self, accelerator: str, cores: int | None) -> None:
        """Limit what there is of a family of accelerators, such as v5litepod, or with None don't. What runs goes on."""
        _limit(self.capacity, accelerator, cores)
        self.advance()

    def set_quota(self, accelerator: str, cores: int | None) -> None:
        """Limit what may be asked for at once of a family of accelerators, or with None don't."""
        _limit(self.quotas, accelerator, cores)

    def fail_deletions(self, code: str = "INTERNAL", times: int = 1) -> None:
        """Let the next deletions be accepted, and their operations end with an error.

        What they were to delete stays as it is, and the same request under the same id is answered with them.
        """
        self._failing_deletions += [RefusedError(code, f"injected {code}")] * times

    def add(self, resource: CloudQueuedResource) -> None:
        """Put a queued resource there, as somebody else would, with the nodes of its state."""
        self.resources[resource.place, resource.id] = resource
        if resource.state in {"PROVISIONING", "ACTIVE"}:
            for node_id in resource.node_ids:
                self.create_node(resource, node_id)
                if resource.state == "ACTIVE":
                    self.become_ready((resource.place, node_id))

    def fail(self, queued_resource: str, code: str = "INTERNAL", message: str = "") -> None:
        self.end(self._find_by_name(queued_resource, self.resources), RefusedError(code, message))

    def suspend(self, queued_resource: str, initiator: str = "SERVICE") -> None:
        """Take all nodes of a queued resource away, where it has some."""
        self.shut_down(self._find_by_name(queued_resource, self.resources), initiator)

    def delete(self, queued_resource: str) -> None:
        """Delete a queued resource, as somebody else would who deletes what is there."""
        key = self._find_by_name(queued_resource, self.resources)
        if self.resources[key].state != "DELETING":
            self.begin_deletion(key)

    def delete_node(self, node: str) -> None:
        """Delete a node, as somebody else would; its queued resource loses all of them, by the user's doing."""
        key = self._find_by_name(node, self.nodes)
        self.remove_later(key)
        resource = self.nodes[key].queued_resource.rpartition("/")[2]
        self.shut_down((key[0], resource), "USER")

    def preempt(self, node: str, state: str = "PREEMPTED") -> None:
        """Take a node away; its queued resource is suspended a little later."""
        key = self._find_by_name(node, self.nodes)
        self.nodes[key] = replace(self.nodes[key], maintenance=None)
        self.take_away(key, state, "preempted")

    def announce_maintenance(
        self, node: str, *, starts_in_s: float, lasts_s: float = 3600.0, ends_in: str = "REPAIRING"
    ) -> None:
        """Announce a window of maintenance for a node that runs.

        Args:
            node: The node.
            starts_in_s: From now to the window's start.
            lasts_s: The window's length.
            ends_in: The node's state once it is down. REPAIRING nodes come back; TERMINATED or PREEMPTED ones don't,
                and their queued resource is suspended.
        """
        key = self._find_by_name(node, self.nodes)
        start = int(self.now() + starts_in_s)
        window = CloudMaintenance(
            type="SCHEDULED",
            status="PENDING",
            window_start=start,
            window_end=int(start + lasts_s),
        )
        self.nodes[key] = replace(self.nodes[key], maintenance=window)
        self._later(
            f"{name_of(self.nodes[key])} maintenance", starts_in_s, partial(self.maintain, key, ends_in)
        )

    def processes_exited(self, node: str) -> None:
        """Report that the processes of a node with autocheckpoint have ended, so that maintenance needn't wait."""
        self.end_grace(self._find_by_name(node, self.nodes))

    def set_nodes(
        self,
        state: str | None = None,
        *,
        maintenance: CloudMaintenance | None = None,
        autocheckpoint: bool | None = None,
    ) -> None:
        """Change what is shown of all nodes, without the consequences."""
        for key, node in self.nodes.items():
            enabled = node.autocheckpoint_enabled if autocheckpoint is None else autocheckpoint
            changed = replace(node, maintenance=maintenance, autocheckpoint_enabled=enabled)
            self.nodes[key] = replace(changed, state=state or node.state)

    def _find_by_name(self, name: str, there: Mapping[Key, Any]) -> Key:
        """Find by an id, or by a full name.

        Raises:
            LookupError: There is none, or several.
        """
        self.advance()
        found = [key for key in there if key[1] == name.rpartition("/")[2]]
        if len(found) != 1:
            raise LookupError(
                f"{len(found)} are named '{name}': {', '.join(key[1] for key in there) or 'none'}"
            )
        return found[0]


def _limit(limits: dict[str, int], accelerator: str, cores: int | None) -> None:
    if cores is None:
        limits.pop(accelerator, None)
    else:
        limits[accelerator] = cores
