"""Test what `make demo-tpu` makes of the statuses it sees: printed lines, the machines' story, and room at its time."""

from typing import Any

import pytest

from demo.teller import Teller
from demo.watch import Event, StatusChanged
from demo_tpu.follower import Follower
from demo_tpu.story import Answer, MachinesStory, Window
from demo_tpu.watch import MachinesChanged

NOW = 1_700_000_000
"""2023-11-14T22:13:20Z."""
CLOUD_NAME = "projects/my-project/locations/us-west4-a/queuedResources/default-v5e-4"


def machines(
    at_s: float, state: str, joined: str = "", node: dict[str, Any] | None = None, **more: str
) -> Event:
    status: dict[str, Any] = {"state": state, "cloudName": CLOUD_NAME, "joined": joined, **more}
    return MachinesChanged(at_s=NOW + at_s, status=status | ({"nodes": [node]} if node else {}))


def job(at_s: float, phase: str, **status: Any) -> Event:
    return StatusChanged(at_s=NOW + at_s, status={"phase": phase, **status})


def suspended(at_s: float, reason: str) -> Event:
    condition = {"type": "Suspended", "status": "True", "reason": reason, "message": f"it waits: {reason}"}
    return job(at_s, "Suspended", conditions=[condition])


def follow(*events: Event, announced_at_s: float = 0.0) -> tuple[MachinesStory, int]:
    """Return the story, and how often room was asked for."""
    called: list[None] = []
    follower = Follower(Teller(NOW), when_waiting=lambda: called.append(None))
    follower.note_announcement(NOW + announced_at_s)
    for event in events:
        follower.see(event)
    return follower.story, len(called)


def test_room_is_made_once_and_only_for_a_job_that_waits_for_a_request_in_the_queue() -> None:
    queued, waits = machines(2, "WaitingForResources"), suspended(1, "WaitingForQueuedResource")
    assert follow(waits, machines(1, "Creating"))[1] == 0
    assert follow(queued)[1] == 0
    assert follow(waits, machines(1, "Creating"), queued, queued, waits)[1] == 1
    assert follow(queued, waits)[1] == 1


def test_machines_and_maintenance_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"id": "maintenance-1", "reason": "maintenance in 28 s"}
    saved = request | {"sequence": 3, "step": 71}
    ongoing = {"name": "n", "state": "Ready", "upcomingMaintenance": {"status": "Ongoing"}}
    story, _ = follow(
        machines(1, "Active", "0/1"),
        machines(12, "Active", "1/1", nextMaintenanceTime="2023-11-14T22:14:00Z"),
        job(13, "Running", checkpoint={"lastRequest": request}),
        job(15, "Running", checkpoint={"lastRequest": saved}),
        job(16, "Running", checkpoint={"lastRequest": saved}),
        machines(40, "Active", "1/1", node=ongoing),
        machines(41, "Active", "1/1", node={"name": "default-v5e-4", "state": "Preempted"}),
        machines(42, "Suspended"),
        announced_at_s=10,
    )
    assert story.window == Window(announced_s=10, begin_s=40)
    assert story.answer == Answer(sequence=3, step=71)
    last = story.views[-1]
    assert (last.state, last.cloud_id, last.joined, last.lost) == ("Suspended", "default-v5e-4", False, True)
    told = capsys.readouterr().out
    for line in (
        "queued resource default-v5e-4: Active\n",
        "1 of 1 hosts joined the cluster",
        "the operator asks the job to save: maintenance in 28 s",
        "SAVED AHEAD: step 71, entry 3 of the log",
        "the window begins",
        "THE MACHINES ARE TAKEN AWAY: default-v5e-4 is Preempted",
    ):
        assert told.count(line) == 1, line
