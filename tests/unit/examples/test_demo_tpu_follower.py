"""Test what `make demo-tpu` makes of the statuses it sees: printed lines, the machines' story, and room at its time."""

from typing import Any

import pytest

from demo.teller import Teller
from demo.watch import Event, StatusChanged
from demo_tpu.follower import Follower
from demo_tpu.story import Answer, MachinesStory, Restarts, Window
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


def test_machines_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    story, _ = follow(
        machines(1, "Active", "0/1"),
        machines(2, "Active", "1/1"),
        machines(3, "Active", "1/1", node={"name": "default-v5e-4", "state": "Preempted"}),
        machines(4, "Suspended"),
    )
    assert [(view.at_s, view.state, view.cloud_id, view.joined, view.lost) for view in story.views] == [
        (1, "Active", "default-v5e-4", False, False),
        (2, "Active", "default-v5e-4", True, False),
        (3, "Active", "default-v5e-4", True, True),
        (4, "Suspended", "default-v5e-4", False, True),
    ]
    told = capsys.readouterr().out
    assert told.count("queued resource default-v5e-4: Active\n") == 1
    assert told.count("1 of 1 hosts joined the cluster") == 1
    assert told.count("THE MACHINES ARE TAKEN AWAY: default-v5e-4 is Preempted") == 1


def test_a_window_of_maintenance_and_the_save_ahead_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"id": "maintenance-1", "reason": "maintenance in 28 s"}
    ongoing = {"name": "n", "state": "Ready", "upcomingMaintenance": {"status": "Ongoing"}}
    story, _ = follow(
        machines(12, "Active", nextMaintenanceTime="2023-11-14T22:14:00Z"),
        machines(13, "Active", nextMaintenanceTime="2023-11-14T22:15:00Z"),
        job(13, "Running", checkpoint={"lastRequest": request}),
        job(15, "Running", checkpoint={"lastRequest": request | {"sequence": 3, "step": 71}}),
        job(16, "Running", checkpoint={"lastRequest": request | {"sequence": 3, "step": 71}}),
        machines(40, "Active", node=ongoing),
        machines(41, "Active", node=ongoing),
        announced_at_s=10,
    )
    assert story.window == Window(announced_s=10, begin_s=40)
    assert story.answer == Answer(sequence=3, step=71)
    told = capsys.readouterr().out
    assert told.count("the operator asks the job to save: maintenance in 28 s") == 1
    assert told.count("SAVED AHEAD: step 71, entry 3 of the log") == 1
    assert told.count("the window begins") == 1


def test_room_is_made_once_and_only_for_a_job_that_waits_for_a_request_in_the_queue() -> None:
    queued, waits = machines(2, "WaitingForResources"), suspended(1, "WaitingForQueuedResource")
    assert follow(waits, machines(1, "Creating"))[1] == 0
    assert follow(queued)[1] == 0
    story, n_calls = follow(
        waits, machines(1, "Creating"), queued, queued, waits, job(3, "Complete", restarts=COUNTED)
    )
    assert n_calls == 1
    assert story.restarts == Restarts(total=3, by_cause={"X": 3}, counted_towards_limit=2)


COUNTED = {"total": 3, "byCause": [{"cause": "X", "count": 3, "countedTowardsLimit": 2}]}
