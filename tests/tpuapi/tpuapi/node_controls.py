"""What a test does to nodes behind their users' backs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tpuapi.core.names import NODES
from tpuapi.core.values import Health, Maintenance, Node, NodeState, Symptom
from tpuapi.core.world import World
from tpuapi.engine import Engine
from tpuapi.machine import maintenance as events

Found = TypeVar("Found")


class NodeControls:
    """Preempt, maintain and hurt nodes. They are named by their full names, or by ids that are unique."""

    engine: Engine

    def node(self, name: str) -> Node:
        """Find a node.

        Raises:
            LookupError: There is none, or several.
        """
        self.engine.advance()
        return find_by_name(name, NODES, self.engine.world.nodes)

    def preempt(self, node: str, state: str = "PREEMPTED") -> None:
        """Take a node away; its queued resource is suspended a little later."""
        self._change_node(node, lambda w, n: events.preempt(w, n.name, w.now, state=NodeState(state)))

    def announce_maintenance(
        self,
        node: str,
        *,
        starts_in_s: float,
        lasts_s: float = 3600.0,
        can_reschedule: bool = False,
        kind: str = "SCHEDULED",
        ends_in: str = "REPAIRING",
    ) -> None:
        """Announce a window of maintenance for a node that runs.

        Args:
            node: The node.
            starts_in_s: From now to the window's start.
            lasts_s: The window's length.
            can_reschedule: PerformMaintenance may begin it sooner.
            kind: SCHEDULED or UNSCHEDULED.
            ends_in: The node's state once it is down. REPAIRING nodes come back; TERMINATED or PREEMPTED ones don't,
                and their queued resource is suspended.
        """

        def announce(world: World, found: Node) -> World:
            start = world.now + starts_in_s
            window = Maintenance(
                kind=kind,
                can_reschedule=can_reschedule,
                start=start,
                end=start + lasts_s,
                latest_start=start,
                ends_in=NodeState(ends_in),
            )
            return world.with_node(replace(found, maintenance=window))

        self._change_node(node, announce)

    def cancel_maintenance(self, node: str) -> None:
        self._change_node(node, lambda w, n: w.with_node(replace(n, maintenance=None)))

    def processes_exited(self, node: str) -> None:
        """Tell that the processes of a node with autocheckpoint have ended, so that maintenance needn't wait."""
        self._change_node(node, lambda w, n: events.processes_exited(w, n.name, w.now))

    def set_health(self, node: str, health: str, description: str = "") -> None:
        self._change_node(
            node,
            lambda w, n: w.with_node(replace(n, health=Health(health), health_description=description)),
        )

    def add_symptom(self, node: str, kind: str, details: str = "", worker_id: str = "0") -> None:
        self._change_node(
            node,
            lambda w, n: w.with_node(
                replace(
                    n,
                    symptoms=(
                        *n.symptoms,
                        Symptom(kind=kind, details=details, worker_id=worker_id, create_time=w.now),
                    ),
                )
            ),
        )

    def show_node(self, node: str, **fields: Any) -> None:
        """Answer with these fields of the node, such as a state's number that no client knows; with none: its own."""
        self._change_node(node, lambda w, n: w.with_node(replace(n, shown=fields)))

    def _change_node(self, name: str, change: Callable[[World, Node], World]) -> None:
        full_name = self.node(name).name
        self.engine.change(lambda world: change(world, world.nodes[full_name]))


def find_by_name(name: str, collection: str, there: Mapping[str, Found]) -> Found:
    """Find by a full name, or by an id that only one has.

    Raises:
        LookupError: There is none, or several.
    """
    found = [value for key, value in there.items() if key == name or key.endswith(f"/{collection}/{name}")]
    if len(found) != 1:
        raise LookupError(
            f"{len(found)} of the {collection} are named '{name}': {', '.join(there) or 'none'}"
        )
    return found[0]
