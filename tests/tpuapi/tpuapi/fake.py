"""A Cloud TPU service to test against, and everything that a test does to it behind its clients' backs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpuapi.clock import Clock, SteppedClock
from tpuapi.core import accelerators
from tpuapi.core.names import QUEUED_RESOURCES, RESERVATIONS, Location
from tpuapi.core.values import NodeEvent, QueuedResource
from tpuapi.core.world import Habits, QuotaKey, Timings, World
from tpuapi.engine import Engine, Hook, LoggedCall
from tpuapi.fault_controls import FaultControls
from tpuapi.faults import status_of
from tpuapi.machine import queued
from tpuapi.machine.advance import next_due
from tpuapi.node_controls import NodeControls, find_by_name

RUNTIME_VERSIONS = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-tf-2.17.0-pjrt",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)


class FakeTpu(NodeControls, FaultControls):
    """One Cloud TPU service: `serving(FakeTpu())` answers real clients.

    Queued resources and nodes are named by their full names, or by their ids where these are unique.

    Args:
        clock: Its time; by default it stands still until `step`.
        timings: How long things take.
        habits: How it behaves where services have been seen to differ.
    """

    def __init__(
        self, clock: Clock | None = None, *, timings: Timings | None = None, habits: Habits | None = None
    ) -> None:
        self.clock = clock or SteppedClock()
        world = World(
            now=self.clock.now(),
            timings=timings or Timings(),
            habits=habits or Habits(),
            runtime_versions=RUNTIME_VERSIONS,
        )
        self.engine = Engine(self.clock, world)

    @property
    def calls(self) -> tuple[LoggedCall, ...]:
        return tuple(self.engine.calls)

    @property
    def events(self) -> tuple[NodeEvent, ...]:
        """All that has happened to nodes' machines."""
        return tuple(self.engine.events)

    def count(self, method: str) -> int:
        """Return how often a method, such as CreateQueuedResource, was called, with whatever success."""
        return self.engine.count(method)

    def forget_calls(self) -> None:
        self.engine.calls.clear()

    def step(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            TypeError: The clock is not one to step.
        """
        if not isinstance(self.clock, SteppedClock):
            raise TypeError("this clock runs by itself")
        self.clock.step(seconds)
        self.engine.advance()

    def step_to_next(self) -> float:
        """Let time pass until something happens by itself; return the seconds, 0 if nothing is going to."""
        self.engine.advance()
        due = next_due(self.engine.world)
        seconds = 0.0 if due is None else max(0.0, due - self.clock.now())
        self.step(seconds)
        return seconds

    def queued_resource(self, name: str) -> QueuedResource:
        """Find a queued resource.

        Raises:
            LookupError: There is none, or several.
        """
        self.engine.advance()
        return find_by_name(name, QUEUED_RESOURCES, self.engine.world.queued)

    def set_capacity(self, zone: str, accelerator: str, cores: int | None) -> None:
        """Limit what a zone has of an accelerator's family, or with None don't. What runs goes on."""
        key = (zone, accelerators.family_of(accelerator).kind)
        self.engine.change(
            lambda w: replace(
                w,
                capacity={k: v for k, v in w.capacity.items() if k != key}
                if cores is None
                else {**w.capacity, key: cores},
            )
        )

    def set_quota(
        self, project: str, zone: str, accelerator: str, cores: int | None, *, preemptible: bool = False
    ) -> None:
        """Limit what a project may have asked for at once, or with None don't."""
        key = QuotaKey(project, zone, accelerators.family_of(accelerator).kind, preemptible)
        self.engine.change(
            lambda w: replace(
                w,
                quotas={k: v for k, v in w.quotas.items() if k != key}
                if cores is None
                else {**w.quotas, key: cores},
            )
        )

    def set_timings(self, **seconds: float) -> None:
        """Change how long things take from now on; the names are those of Timings."""
        self.engine.change(lambda w: replace(w, timings=replace(w.timings, **seconds)))

    def set_habits(self, **values: Any) -> None:
        """Change how the service behaves from now on; the names are those of Habits."""
        self.engine.change(lambda w: replace(w, habits=replace(w.habits, **values)))

    def fail(self, queued_resource: str, code: str = "INTERNAL", message: str = "", reason: str = "") -> None:
        """End a queued resource as FAILED with this error."""
        name = self.queued_resource(queued_resource).name
        error = status_of(code, message, reason, None)
        self.engine.change(lambda w: queued.fail(w, name, error, w.now))

    def show_queued_resource(self, queued_resource: str, **fields: Any) -> None:
        """Answer with these fields of it, such as a state's number that no client knows; with none: its own."""
        found = self.queued_resource(queued_resource)
        self.engine.change(lambda w: w.with_queued(replace(w.queued[found.name], shown=fields)))

    def add_reservation(self, project: str, zone: str, reservation: str, accelerator: str, cores: int) -> str:
        """Add a reservation that requests may name; return its name."""
        name = Location(project, zone).name(RESERVATIONS, reservation)
        body = {
            "name": name,
            "state": "ACTIVE",
            "standard": {"size": cores, "capacity_units": "CORES", "resource_type": accelerator},
        }
        self.engine.change(lambda w: replace(w, reservations={**w.reservations, name: body}))
        return name

    def set_unreachable(self, zones: Sequence[str]) -> None:
        """Let lists over all zones miss these ones, and say so."""
        self.engine.change(lambda w: replace(w, unreachable=frozenset(zones)))

    def add_hook(self, hook: Hook) -> None:
        """Call `hook` with everything that happens to nodes' machines."""
        self.engine.hooks.append(hook)
