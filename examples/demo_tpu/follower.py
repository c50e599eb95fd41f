"""Follow the machines beside the job: print their events, and write their part of the story."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from demo.line_printer import LinePrinter
from demo.watch import Event, StatusChanged
from demo_tpu.story import Answer, MachinesStory, MachinesView, Restarts, Wait, Window
from demo_tpu.watch import MachinesChanged, UndisturbedStep

__all__ = ["Follower"]

_TAKEN = ("Preempted", "Terminated")
_ENDING = ("Suspending", "Suspended")
_STEPS_BETWEEN_LINES = 30


class Follower:
    """Sees all events of a run.

    Args:
        print_line: Prints a line.
        when_waiting: Called once, when the job waits for its machines and their request stands in the queue.

    """

    def __init__(self, print_line: LinePrinter, *, when_waiting: Callable[[], None]) -> None:
        self.story = MachinesStory()
        self._print_line = print_line
        self._when_waiting: Callable[[], None] | None = when_waiting
        self._printed: set[str] = set()
        self._announced_s = 0.0

    def see(self, event: Event) -> None:
        """Record an event, and print what it shows of the machines."""
        match event:
            case MachinesChanged():
                self._see_machines(event.at_s, event.status)
            case StatusChanged():
                self._see_job(event.at_s, event.status)
            case UndisturbedStep() if event.step % _STEPS_BETWEEN_LINES == 0:
                self._print_line(
                    f"meanwhile, the same training undisturbed on this machine: step {event.step}"
                )
            case _:
                pass  # The director's.
        self._call_when_waiting()

    def note_announcement(self, at_unix_s: float) -> None:
        """Record when the cloud was asked to announce maintenance."""
        self._announced_s = self._since(at_unix_s)

    def _see_machines(self, at_unix_s: float, status: dict[str, Any]) -> None:
        joined, _, hosts = status.get("joined", "").partition("/")
        view = MachinesView(
            at_s=self._since(at_unix_s),
            state=status.get("state", "Pending"),
            cloud_id=status.get("cloudName", "").rpartition("/")[2],
            joined=bool(hosts) and joined == hosts,
            lost=_is_lost(status),
        )
        before = self.story.views[-1] if self.story.views else None
        self.story.views.append(view)
        if before is None or (view.state, view.cloud_id) != (before.state, before.cloud_id):
            self._print_line(
                f"queued resource {view.cloud_id or '(not asked for yet)'}: {view.state}", at_unix_s
            )
        if view.joined and (before is None or not before.joined):
            self._print_line(
                f"queued resource {view.cloud_id}: {joined} of {hosts} hosts joined the cluster", at_unix_s
            )
        if _is_maintained(status):
            self._print_once(
                "the window begins: the cloud sends SIGTERM and waits for the training", at_unix_s
            )
        if view.lost and (before is None or not before.lost):
            nodes = ", ".join(f"{node['name']} is {node['state']}" for node in status.get("slices", []))
            self._print_line(f"THE MACHINES ARE TAKEN AWAY: {nodes or view.state}", at_unix_s)
        self._see_window(at_unix_s, status)

    def _see_window(self, at_unix_s: float, status: dict[str, Any]) -> None:
        begin = status.get("nextMaintenanceTime")
        if begin is None or self.story.window is not None:
            return
        begin_unix_s = datetime.fromisoformat(begin).timestamp()
        self.story.window = Window(announced_s=self._announced_s, begin_s=self._since(begin_unix_s))
        self._print_line(f"the operator knows of maintenance in {begin_unix_s - at_unix_s:.0f} s", at_unix_s)

    def _see_job(self, at_unix_s: float, status: dict[str, Any]) -> None:
        phase = status.get("phase", "")
        self.story.phases.append((self._since(at_unix_s), phase))
        for condition in status.get("conditions", []):
            if condition["type"] == "Suspended" and condition["status"] == "True":
                self._see_wait(at_unix_s, condition)
        request = status.get("checkpoint", {}).get("lastRequest")
        if request is not None:
            self._see_request(at_unix_s, request)
        self.story.restarts = _count_restarts(status)

    def _see_wait(self, at_unix_s: float, condition: dict[str, Any]) -> None:
        waits = self.story.waits
        if not waits or waits[-1].reason != condition["reason"]:
            waits.append(Wait(at_s=self._since(at_unix_s), reason=condition["reason"]))
            self._print_line(
                f"the job is suspended ({condition['reason']}): {condition['message']}", at_unix_s
            )

    def _see_request(self, at_unix_s: float, request: dict[str, Any]) -> None:
        self._print_once(f"the operator asks the job to save: {request['reason']}", at_unix_s)
        if "sequence" in request and self.story.answer is None:
            self.story.answer = Answer(sequence=request["sequence"], step=request["step"])
            self._print_line(
                f"SAVED AHEAD: step {request['step']}, entry {request['sequence']} of the log", at_unix_s
            )

    def _print_once(self, text: str, at_unix_s: float) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._print_line(text, at_unix_s)

    def _call_when_waiting(self) -> None:
        if self._when_waiting is None or not self.story.waits or not self.story.views:
            return
        if self.story.views[-1].state == "WaitingForResources":
            call, self._when_waiting = self._when_waiting, None
            call()

    def _since(self, at_unix_s: float) -> float:
        return at_unix_s - self._print_line.started_unix_s


def _is_lost(status: dict[str, Any]) -> bool:
    taken = any(node["state"] in _TAKEN for node in status.get("slices", []))
    return taken or status.get("state") in _ENDING


def _is_maintained(status: dict[str, Any]) -> bool:
    announced = (node.get("upcomingMaintenance", {}) for node in status.get("slices", []))
    return any(maintenance.get("status") == "Ongoing" for maintenance in announced)


def _count_restarts(status: dict[str, Any]) -> Restarts:
    restarts = status.get("restarts", {})
    by_cause = restarts.get("byCause", [])
    return Restarts(
        total=restarts.get("total", 0),
        by_cause={entry["cause"]: entry["count"] for entry in by_cause},
        counted_towards_limit=sum(entry.get("countedTowardsLimit", 0) for entry in by_cause),
    )
