"""Describe in pure values what happened to the machines, and check that it bears out what the demo claims."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from demo.story import StepSeen, Story

__all__ = [
    "Answer",
    "MachinesStory",
    "MachinesView",
    "Restarts",
    "Span",
    "Wait",
    "Window",
    "broken_machine_claims",
    "find_notice_s",
    "spans",
]

WAITING, ACTIVE = "WaitingForResources", "Active"
WAITS_FOR_MACHINES = "WaitingForQueuedResource"

_NOTICE_STEPS = 60
_SHORTEST_NOTICE_S, _LONGEST_NOTICE_S = 30.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesView:
    """The status of the QueuedResource at one time."""

    at_s: float
    """Seconds since the job was applied, here and below."""

    state: str
    cloud_id: str
    joined: bool
    """All hosts are nodes of the cluster."""

    lost: bool = False
    """The cloud has taken a machine away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The job is suspended, and its condition has the reason."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Maintenance that the cloud announced."""

    announced_s: float
    begin_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The commit that answered the operator's request to save."""

    sequence: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """What the job's status counted in the end."""

    total: int
    by_cause: Mapping[str, int]
    counted_towards_limit: int


@dataclass(slots=True, kw_only=True)
class MachinesStory:
    views: list[MachinesView] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)
    """Of the job."""

    window: Window | None = None
    answer: Answer | None = None
    restarts: Restarts | None = None
    undisturbed: Mapping[int, str] = field(default_factory=dict)
    """The exact losses of the same training that nothing happened to, by steps."""

    leftovers: list[str] = field(default_factory=list)
    """What was in the cloud after the QueuedResource had been deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A while in which a state lasted."""

    begin_s: float
    end_s: float
    state: str


def spans(seen: list[tuple[float, str]], end_s: float) -> list[Span]:
    """Return how long each state lasted; the last one until `end_s`."""
    changes = [now for before, now in pairwise([(0.0, ""), *seen]) if now[1] != before[1]]
    ends = [at_s for at_s, _ in changes[1:]] + [end_s]
    return [
        Span(begin_s=at_s, end_s=end, state=state)
        for (at_s, state), end in zip(changes, ends, strict=True)
        if end > at_s
    ]


def find_notice_s(steps: Sequence[StepSeen]) -> float:
    """Find how long the announcement comes before the window, from the steps so far.

    A slow machine has time to save ahead of the window. The job, which rests 0.3 s after each of its 180 steps, still
    trains then.
    """
    step_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    return min(_LONGEST_NOTICE_S, max(_SHORTEST_NOTICE_S, _NOTICE_STEPS * step_s))


def broken_machine_claims(story: Story, machines: MachinesStory, *, cause: str) -> list[str]:
    """Return those claims about the machines that this run does not bear out; empty if all of them hold."""
    return [
        *_start_without_machines(story, machines),
        *_not_recreated(story, machines),
        *_not_saved_ahead(story, machines),
        *_miscounted(machines, cause),
        *_unlike_undisturbed(story, machines),
        *(f"the cloud still has {name}" for name in machines.leftovers),
    ]


def _start_without_machines(story: Story, machines: MachinesStory) -> Iterator[str]:
    """Check that the job waited with a reason until all hosts had joined."""
    first_pod_s = story.attempts[0].steps[0].at_s if story.attempts and story.attempts[0].steps else 0.0
    if not any(wait.reason == WAITS_FOR_MACHINES and wait.at_s < first_pod_s for wait in machines.waits):
        yield f"the job did not wait, suspended, for its machines: {machines.waits}"
    if not any(view.state == WAITING and view.at_s < first_pod_s for view in machines.views):
        yield "the request was not seen waiting in the queue before the job ran"
    if not any(view.joined and view.at_s < first_pod_s for view in machines.views):
        yield "the job ran before its hosts had joined"


def _not_recreated(story: Story, machines: MachinesStory) -> Iterator[str]:
    ids = list(
        dict.fromkeys(view.cloud_id for view in machines.views if view.state == ACTIVE and view.joined)
    )
    if len(ids) != 2 or ids[1] != f"{ids[0]}-r1":
        yield f"the cloud resources that became active and joined were {ids}, not one and its -r1"
    if not any(view.lost for view in machines.views):
        yield "no machine was seen to be taken away"
    nodes = [attempt.node for attempt in story.attempts]
    if len(set(nodes)) != len(nodes):
        yield f"the job did not continue on another machine: {nodes}"


def _not_saved_ahead(story: Story, machines: MachinesStory) -> Iterator[str]:
    window, answer = machines.window, machines.answer
    if window is None:
        yield "no maintenance was announced"
        return
    if answer is None:
        yield "no commit answered the request to save ahead of the maintenance"
        return
    commit = next((c for c in story.commits if c.sequence == answer.sequence), None)
    if commit is None or commit.step != answer.step:
        yield f"the status names {answer} as the save ahead of the maintenance; the log has {commit}"
    elif not window.announced_s < commit.at_s < window.begin_s:
        yield (
            f"step {commit.step} was saved at {commit.at_s:.1f} s, not between the announcement "
            f"({window.announced_s:.1f} s) and the window ({window.begin_s:.1f} s)"
        )
    if story.attempts and story.attempts[0].last_step <= answer.step:
        yield f"the training did not continue after the save of step {answer.step}"


def _miscounted(machines: MachinesStory, cause: str) -> Iterator[str]:
    restarts = machines.restarts
    if restarts is None:
        yield "the job's status counts no restarts"
    elif restarts != Restarts(total=1, by_cause={cause: 1}, counted_towards_limit=0):
        yield f"the loss of the machines is not counted as one {cause} and no failure: {restarts}"


def _unlike_undisturbed(story: Story, machines: MachinesStory) -> Iterator[str]:
    seen = {step.step: step.exact for attempt in story.attempts for step in attempt.steps}
    unlike = sorted(
        step
        for step in seen.keys() | machines.undisturbed.keys()
        if seen.get(step) != machines.undisturbed.get(step)
    )
    if unlike:
        yield f"the losses of steps {unlike[:5]} … ({len(unlike)} in all) are not those of an undisturbed run"
