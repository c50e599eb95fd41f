"""`make demo-tpu` exits non-zero if something it claims of the machines did not happen: each claim, broken once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.story import Attempt, Commit, Disruption, Resume, StepSeen, Story
from demo_tpu.picture import draw
from demo_tpu.story import (
    Answer,
    MachinesStory,
    MachinesView,
    Restarts,
    Span,
    Wait,
    Window,
    broken_machine_claims,
    find_notice_s,
    spans,
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


def _did_not_wait(_story: Story, machines: MachinesStory) -> None:
    del machines.waits[0]


def _was_never_queued(_story: Story, machines: MachinesStory) -> None:
    del machines.views[0]


def _ran_before_hosts_joined(story: Story, _machines: MachinesStory) -> None:
    story.attempts[0].steps[0] = dataclasses.replace(story.attempts[0].steps[0], at_s=8)


def _not_recreated(_story: Story, machines: MachinesStory) -> None:
    del machines.views[-1]


def _not_lost(_story: Story, machines: MachinesStory) -> None:
    del machines.views[4]


def _same_machine(story: Story, _machines: MachinesStory) -> None:
    story.attempts[1].node = "n1"


def _no_announcement(_story: Story, machines: MachinesStory) -> None:
    machines.window = None


def _not_answered(_story: Story, machines: MachinesStory) -> None:
    machines.answer = None


def _answer_not_in_log(_story: Story, machines: MachinesStory) -> None:
    machines.answer = Answer(sequence=9, step=14)


def _saved_before_announcement(story: Story, _machines: MachinesStory) -> None:
    story.commits[0] = dataclasses.replace(story.commits[0], at_s=21)


def _saved_in_window(story: Story, _machines: MachinesStory) -> None:
    story.commits[0] = dataclasses.replace(story.commits[0], at_s=30)


def _stopped_by_the_save(story: Story, _machines: MachinesStory) -> None:
    del story.attempts[0].steps[14:]


def _other_cause(_story: Story, machines: MachinesStory) -> None:
    machines.restarts = Restarts(total=1, by_cause={"NodeFailure": 1}, counted_towards_limit=0)


def _counted_twice(_story: Story, machines: MachinesStory) -> None:
    machines.restarts = Restarts(total=2, by_cause={"SpotPreemption": 2}, counted_towards_limit=0)


def _counted_as_failure(_story: Story, machines: MachinesStory) -> None:
    machines.restarts = Restarts(total=1, by_cause={"SpotPreemption": 1}, counted_towards_limit=1)


def _nothing_counted(_story: Story, machines: MachinesStory) -> None:
    machines.restarts = None


def _other_loss(story: Story, _machines: MachinesStory) -> None:
    step = story.attempts[1].steps[1]
    story.attempts[1].steps[1] = dataclasses.replace(step, exact="0x1.8p+0")


def _undisturbed_run_ended_early(_story: Story, machines: MachinesStory) -> None:
    machines.undisturbed = {}


def _left_behind(_story: Story, machines: MachinesStory) -> None:
    machines.left_behind.append("nodes/default-v5e-4-r1")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_did_not_wait, "did not wait, suspended"),
        (_was_never_queued, "not seen waiting in the queue"),
        (_ran_before_hosts_joined, "ran before its hosts had joined"),
        (_not_recreated, "not one and its -r1"),
        (_not_lost, "no machine was seen to be taken away"),
        (_same_machine, "did not go on on another machine"),
        (_no_announcement, "no maintenance was announced"),
        (_not_answered, "no commit answered"),
        (_answer_not_in_log, "the log has None"),
        (_saved_before_announcement, "not between the announcement"),
        (_saved_in_window, "not between the announcement"),
        (_stopped_by_the_save, "did not go on after the save"),
        (_other_cause, "not counted as one SpotPreemption"),
        (_counted_twice, "not counted as one SpotPreemption"),
        (_counted_as_failure, "not counted as one SpotPreemption"),
        (_nothing_counted, "counts no restarts"),
        (_other_loss, "the losses of steps [22]"),
        (_undisturbed_run_ended_early, "(30 in all) are not those of an undisturbed run"),
        (_left_behind, "the cloud still has nodes/default-v5e-4-r1"),
    ],
)
def test_each_claim_is_checked(spoil: Callable[[Story, MachinesStory], None], said: str) -> None:
    story, machines = _story(), _machines()
    spoil(story, machines)
    assert any(said in line for line in _broken(story, machines))


def test_a_state_lasts_until_another_is_seen() -> None:
    seen = [(1.0, "Suspended"), (2.0, "Suspended"), (5.0, "Running"), (5.0, "Complete")]
    assert spans(seen, 9.0) == [
        Span(begin_s=1.0, end_s=5.0, state="Suspended"),
        Span(begin_s=5.0, end_s=9.0, state="Complete"),
    ]


@pytest.mark.parametrize(("step_s", "notice_s"), [(0.4, 30), (1, 60), (5, 120)])
def test_a_slow_machine_has_longer_notice(step_s: float, notice_s: float) -> None:
    steps = [
        StepSeen(at_s=step * step_s, step=step, epoch=0, loss=1, exact="0x1.0p+0") for step in range(1, 71)
    ]
    assert find_notice_s(steps) == pytest.approx(notice_s)


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_picture_is_what_its_suffix_says(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = (tmp_path / "out" / "story").with_suffix(suffix)
    draw(_story(), _machines(), path, title="a run")
    assert path.read_bytes().startswith(begins)
