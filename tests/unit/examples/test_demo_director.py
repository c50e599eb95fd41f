"""Test what the demo makes of the events it sees for the story of a run."""

import queue
from typing import Any

import pytest

from demo.director import DemoError, Director
from demo.story import Story
from demo.watch import Event, LogGrew, PodStarted, StatusChanged, StepPrinted, unix_s
from stepkeeper.log import CommitRecord, LogState, ManifestRef

NOW = 1_700_000_000.0
MANIFEST = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=0)


def pod(name: str, node: str) -> Event:
    return PodStarted(at_s=NOW, pod=name, node=node)


def steps(pod: str, first: int, last: int) -> list[Event]:
    return [
        StepPrinted(at_s=NOW + step, pod=pod, step=step, epoch=0, loss=1.0, exact=f"loss of {step}")
        for step in range(first, last + 1)
    ]


def log(claim: int, *commits: tuple[int, int]) -> Event:
    records = {
        slot: CommitRecord(slot=slot, claim=0, step=step, folder=str(slot), size_bytes=1, manifest=MANIFEST)
        for slot, step in commits
    }
    tail = max(claim, *records) if records else claim
    return LogGrew(at_s=NOW, state=LogState(tail=tail, claim=claim, commits=records))


def status(phase: str, attempt: int, restored: tuple[int, int] | None = None) -> Event:
    checkpoint: dict[str, Any] = {}
    if restored:
        checkpoint = {"restored": {"sequence": restored[0], "step": restored[1]}}
    numbers = [{"number": number} for number in range(1, attempt + 1)]
    return StatusChanged(at_s=NOW, status={"phase": phase, "checkpoint": checkpoint, "attempts": numbers})


def follow(*seen: Event | list[Event]) -> Story:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for item in seen:
        for event in item if isinstance(item, list) else [item]:
            events.put(event)
    return Director(acts=(), total_steps=10, started_unix_s=NOW).follow(events, quiet_s=20)


def test_a_failed_job_ends_it() -> None:
    with pytest.raises(DemoError, match="the job failed"):
        follow(pod("a", "n1"), status("Failed", 1))


@pytest.mark.parametrize(("digits", "seconds"), [(".672345678", 27.672345), (".5", 27.5), ("", 27.0)])
def test_a_kubelets_time_is_read_with_any_number_of_digits(digits: str, seconds: float) -> None:
    assert unix_s(f"2026-11-21T09:31:27{digits}Z") % 60 == pytest.approx(seconds, abs=1e-5)


def test_a_pod_that_never_came_to_train_and_what_an_older_attempt_restored_are_no_part_of_the_story() -> None:
    story = follow(
        pod("a", "n1"),
        log(0),
        steps("a", 1, 4),
        log(0, (1, 4)),
        pod("b", "n1"),
        pod("c", "n2"),
        log(2, (1, 4)),
        status("Starting", 1, restored=(9, 9)),
        status("Running", 2, restored=(1, 4)),
        steps("c", 5, 10),
        status("Complete", 2, restored=(1, 4)),
    )
    assert [attempt.pod for attempt in story.attempts] == ["a", "c"]
    resume = story.attempts[1].resume
    assert resume is not None
    assert (resume.restored.sequence, resume.named.sequence) == (1, 1)
