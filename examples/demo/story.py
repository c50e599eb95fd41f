"""Describe a run in pure values, and check that they bear out what the demo claims."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Attempt", "Commit", "Disruption", "Resume", "StepSeen", "Story", "broken_claims", "lost_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """A line that the trainer printed."""

    at_s: float
    """Seconds since the job was applied, here and below."""

    step: int
    epoch: int
    loss: float
    exact: str
    """The loss to its last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit entry of the storage log."""

    at_s: float
    sequence: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruption:
    at_s: float
    name: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The commit from which an attempt reported to resume, and the one that the log named when it began."""

    restored: Commit
    """The commit that the job's status names."""

    named: Commit
    """The newest commit of the log before the attempt's begin."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the job: from its pod's first line to its last."""

    pod: str
    node: str
    steps: list[StepSeen] = field(default_factory=list)
    resume: Resume | None = None
    """None: it started from scratch."""

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0


@dataclass(slots=True, kw_only=True)
class Story:
    total_steps: int
    attempts: list[Attempt] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    disruptions: list[Disruption] = field(default_factory=list)
    complete_at_s: float | None = None


def lost_steps(story: Story, index: int) -> list[StepSeen]:
    """Return the steps of attempt `index` that no commit held when it ended, so that they were done again."""
    later = [a.resume for a in story.attempts[index + 1 :] if a.resume is not None]
    return [s for s in story.attempts[index].steps if later and s.step > later[0].restored.step]


def broken_claims(story: Story, *, disruptions: Sequence[str]) -> list[str]:
    """Return those claims of the demo that this run does not bear out; empty if all of them hold."""
    return [
        *_unlike(story, disruptions),
        *(line for attempt in story.attempts for line in _wrong_resume(attempt)),
        *_uncovered_steps(story),
        *_different_losses(story),
    ]


def _unlike(story: Story, disruptions: Sequence[str]) -> list[str]:
    broken = []
    if story.complete_at_s is None:
        broken.append("the job did not become Complete")
    names = [d.name for d in story.disruptions]
    if names != list(disruptions):
        broken.append(f"the disruptions were {names}, not {list(disruptions)}")
    resumed = sum(a.resume is not None for a in story.attempts)
    if resumed < len(disruptions):
        broken.append(f"{resumed} of {len(disruptions)} disrupted attempts were resumed")
    return broken


def _wrong_resume(attempt: Attempt) -> list[str]:
    resume = attempt.resume
    if resume is None:
        return []
    broken = []
    if resume.restored.sequence != resume.named.sequence or resume.restored.step != resume.named.step:
        broken.append(f"{attempt.pod} resumed from {resume.restored}; the log named {resume.named}")
    if attempt.steps and attempt.steps[0].step != resume.restored.step + 1:
        broken.append(
            f"{attempt.pod} resumed from step {resume.restored.step} and continued with {attempt.steps[0].step}"
        )
    return broken


def _uncovered_steps(story: Story) -> list[str]:
    seen = {s.step for a in story.attempts for s in a.steps}
    missing = [step for step in range(1, story.total_steps + 1) if step not in seen]
    return [f"no line was seen of steps {missing[:5]} … ({len(missing)} in all)"] if missing else []


def _different_losses(story: Story) -> list[str]:
    first: dict[int, str] = {}
    broken = []
    for attempt in story.attempts:
        for seen in attempt.steps:
            exact = first.setdefault(seen.step, seen.exact)
            if exact != seen.exact:
                broken.append(f"step {seen.step} had loss {exact}, and {seen.exact} when it was done again")
    return broken
