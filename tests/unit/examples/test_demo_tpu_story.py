"""`make demo-tpu` exits non-zero if something it claims of the machines did not happen: each claim, broken once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.story import Attempt, Commit, Disruption, Resume, StepSeen, Story
from demo_tpu.picture import draw
from demo_tpu.story import (
    Answer,
    MachinesStory,
    MachinesView,
    Restarts,
    Wait,
    Window,
    broken_machine_claims,
)


def _steps(first: int, last: int, *, begin_s: float) -> list[StepSeen]:
    return [
        StepSeen(at_s=begin_s + step - first, step=step, epoch=0, loss=1 / step, exact=(1 / step).hex())
        for step in range(first, last + 1)
    ]


def _view(at_s: float, state: str, cloud_id: str = "default-v5e-4") -> MachinesView:
    joined, lost = state == "Active, joined", state == "Suspended"
    return MachinesView(at_s=at_s, state=state.partition(",")[0], cloud_id=cloud_id, joined=joined, lost=lost)


def _story() -> Story:
    ahead, at_notice = Commit(at_s=24.5, sequence=1, step=14), Commit(at_s=31, sequence=2, step=20)
    return Story(
        total_steps=30,
        attempts=[
            Attempt(pod="a", node="n1", steps=_steps(1, 20, begin_s=11)),
            Attempt(
                pod="b",
                node="n2",
                steps=_steps(21, 30, begin_s=50),
                resume=Resume(restored=at_notice, named=at_notice),
            ),
        ],
        commits=[ahead, at_notice],
        disruptions=[Disruption(at_s=22, name="Maintenance", node="n1")],
        complete_at_s=60,
    )


def _machines() -> MachinesStory:
    return MachinesStory(
        views=[
            _view(1, "WaitingForResources"),
            _view(4, "Provisioning"),
            _view(7, "Active"),
            _view(9, "Active, joined"),
            _view(33, "Suspended"),
            _view(40, "Active", "default-v5e-4-r1"),
            _view(44, "Active, joined", "default-v5e-4-r1"),
        ],
        waits=[Wait(at_s=1, reason="WaitingForQueuedResource"), Wait(at_s=34, reason="QueuedResourceLost")],
        phases=[(0, "Suspended"), (10, "Running"), (34, "Suspended"), (45, "Running"), (60, "Complete")],
        window=Window(announced_s=22, begin_s=30),
        answer=Answer(sequence=1, step=14),
        restarts=Restarts(total=1, by_cause={"SpotPreemption": 1}, counted_towards_limit=0),
        undisturbed={step: (1 / step).hex() for step in range(1, 31)},
    )


def _broken(story: Story, machines: MachinesStory) -> list[str]:
    return broken_machine_claims(story, machines, cause="SpotPreemption")


def test_a_run_as_it_should_be_breaks_no_claim() -> None:
    assert _broken(_story(), _machines()) == []


def _change(items: list[Any], index: int, **change: Any) -> None:
    items[index] = dataclasses.replace(items[index], **change)


def _count(machines: MachinesStory, cause: str, count: int, counted: int) -> None:
    machines.restarts = Restarts(total=count, by_cause={cause: count}, counted_towards_limit=counted)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _, m: m.waits.pop(0), "did not wait, suspended"),
        (lambda _, m: m.views.pop(0), "not seen waiting in the queue"),
        (lambda s, _: _change(s.attempts[0].steps, 0, at_s=8), "ran before its hosts had joined"),
        (lambda _, m: m.views.pop(), "not one and its -r1"),
        (lambda _, m: m.views.pop(4), "no machine was seen to be taken away"),
        (lambda s, _: setattr(s.attempts[1], "node", "n1"), "did not go on on another machine"),
        (lambda _, m: setattr(m, "window", None), "no maintenance was announced"),
        (lambda _, m: setattr(m, "answer", None), "no commit answered"),
        (lambda _, m: setattr(m, "answer", Answer(sequence=9, step=14)), "the log has None"),
        (lambda s, _: _change(s.commits, 0, at_s=21), "not between the announcement"),
        (lambda s, _: _change(s.commits, 0, at_s=30), "not between the announcement"),
        (lambda s, _: s.attempts[0].steps.__delitem__(slice(14, None)), "did not go on after the save"),
        (lambda _, m: _count(m, "NodeFailure", 1, 0), "not counted as one SpotPreemption"),
        (lambda _, m: _count(m, "SpotPreemption", 2, 0), "not counted as one SpotPreemption"),
        (lambda _, m: _count(m, "SpotPreemption", 1, 1), "not counted as one SpotPreemption"),
        (lambda _, m: setattr(m, "restarts", None), "counts no restarts"),
        (lambda s, _: _change(s.attempts[1].steps, 1, exact="0x1.8p+0"), "the losses of steps [22]"),
        (lambda _, m: m.undisturbed.clear(), "(30 in all) are not those of an undisturbed run"),
        (lambda _, m: m.left_behind.append("nodes/v5e-r1"), "the cloud still has nodes/v5e-r1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_claim_is_checked(spoil: Callable[[Story, MachinesStory], object], said: str) -> None:
    story, machines = _story(), _machines()
    spoil(story, machines)
    assert any(said in line for line in _broken(story, machines))


def test_the_picture_is_what_its_suffix_says(tmp_path: Path) -> None:
    path = tmp_path / "out" / "story.png"
    draw(_story(), _machines(), path, title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
