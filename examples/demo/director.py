"""Follow a job, print its events as they happen, and cause the faults when their time has come."""

import contextlib
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from demo.line_printer import LinePrinter
from demo.story import Attempt, Commit, Disruption, Resume, StepSeen, Story, lost_steps
from demo.watch import Event, LogGrew, PodStarted, StatusChanged, StepPrinted
from stepkeeper.log import LogState

__all__ = ["Act", "DemoError", "Director", "midway"]

_STEPS_BETWEEN_LINES = 10
_TICK_S = 0.5
_LAST_LINES_S = 5


class DemoError(RuntimeError):
    """Raised when the job does not end well; the message has the last observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A fault, and when its time has come."""

    name: str
    explanation: str
    cause: Callable[[str], None]
    """Called with the name of the node where the job runs."""

    at_step: int
    uncommitted_steps: int = 0
    """At least that many must be at stake."""


class Director:
    """One run of the job, from `kubectl apply` to Complete.

    Args:
        acts: The faults, in their order.
        total_steps: The job's steps.
        started_unix_s: When it was applied.
        also: Called with each event after the director has seen it.

    """

    def __init__(
        self,
        *,
        acts: Iterable[Act],
        total_steps: int,
        started_unix_s: float,
        also: Callable[[Event], None] | None = None,
    ) -> None:
        self.story = Story(total_steps=total_steps)
        self.print_line = LinePrinter(started_unix_s)
        self._acts = list(acts)
        self._also = also
        self._t0 = started_unix_s
        self._phase = ""
        self._complete_seen_s = 0.0
        self._named: dict[int, Commit] = {}
        self._claims: dict[int, int] = {}
        """The attempts that claimed the root, by their claims."""
        self._resumed = 1
        """Number of the newest attempt whose resume was seen; the first begins from scratch."""
        self._to_redo: list[StepSeen] = []
        # Lines are printed while a fault is being caused.
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._fault: Future[None] = self._executor.submit(lambda: None)

    def follow(self, events: "queue.SimpleQueue[Event]", *, quiet_s: float) -> Story:
        """Follow the run until the job is Complete, and return its story.

        Args:
            events: The events of the run, as they come.
            quiet_s: Longest time without an event, in seconds.

        Raises:
            DemoError: The job failed, or nothing happened for `quiet_s`.

        """
        newest_s = time.monotonic()
        try:
            while not self._ended():
                if time.monotonic() > newest_s + quiet_s:
                    raise DemoError(f"nothing has happened for {quiet_s:.0f} s; the phase is {self._phase!r}")
                with contextlib.suppress(queue.Empty):
                    self._see(events.get(timeout=_TICK_S))
                    newest_s = time.monotonic()
                if self._fault.done():
                    self._fault.result()
                    self._act()
        finally:
            # A fault that has begun comes to its end while there is a cluster.
            self._executor.shutdown()
        return self.story

    def _ended(self) -> bool:
        story = self.story
        if story.complete_at_s is None:
            return False
        # The last lines may come after the phase.
        all_lines = story.attempts[-1].last_step >= story.total_steps
        return all_lines or time.monotonic() > self._complete_seen_s + _LAST_LINES_S

    def _see(self, event: Event) -> None:
        match event:
            case StatusChanged():
                self._see_status(event.at_s, event.status)
            case PodStarted():
                self._see_pod(event)
            case StepPrinted():
                self._see_step(event)
            case LogGrew():
                self._see_log(event.at_s, event.state)
            case _:
                pass  # It is about something else than the job.
        if self._also is not None:
            self._also(event)

    def _see_status(self, at_unix_s: float, status: dict[str, Any]) -> None:
        phase = status.get("phase", "")
        if phase != self._phase:
            self._phase = phase
            self.print_line(f"phase {phase}", at_unix_s)
        if phase == "Failed":
            raise DemoError(f"the job failed: {status.get('conditions')}")
        if phase == "Complete" and self.story.complete_at_s is None:
            self.story.complete_at_s = at_unix_s - self._t0
            self._complete_seen_s = time.monotonic()
        self._see_restored(status)

    def _see_pod(self, event: PodStarted) -> None:
        last = len(self.story.attempts) - 1
        if last >= 0 and not self.story.attempts[last].steps and last not in self._claims.values():
            # It was started on a machine that was about to go, and never came to train.
            self.story.attempts.pop()
        self.story.attempts.append(Attempt(pod=event.pod, node=event.node))
        self.print_line(f"pod {event.pod} runs on {event.node}", event.at_s)

    def _see_restored(self, status: dict[str, Any]) -> None:
        restored = status.get("checkpoint", {}).get("restored")
        number = max((a["number"] for a in status.get("attempts", [])), default=0)
        index = len(self.story.attempts) - 1
        named = self._named.get(index)
        # What an older attempt restored is in the status until the new one's first report.
        if restored is None or named is None or number <= self._resumed:
            return
        if self.story.attempts[index].resume is not None:
            return
        self._resumed = number
        sequence, step = restored["sequence"], restored["step"]
        known = {c.sequence: c for c in self.story.commits}
        commit = known.get(sequence, Commit(at_s=0, sequence=sequence, step=step))
        self.story.attempts[index].resume = Resume(restored=commit, named=named)
        self._to_redo = lost_steps(self.story, index - 1)
        same = "as the log named" if commit == named else f"although the log named entry {named.sequence}"
        self.print_line(
            f"RESUMED from step {step}: restored.sequence is {sequence}, {same}. {_lost(self._to_redo)}"
        )

    def _see_step(self, event: StepPrinted) -> None:
        attempt = next((a for a in self.story.attempts if a.pod == event.pod), None)
        if attempt is None or event.step <= attempt.last_step:
            return
        seen = StepSeen(
            at_s=event.at_s - self._t0, step=event.step, epoch=event.epoch, loss=event.loss, exact=event.exact
        )
        attempt.steps.append(seen)
        if event.step % _STEPS_BETWEEN_LINES == 0 or len(attempt.steps) == 1:
            self.print_line(f"step {event.step:4d}  epoch {event.epoch}  loss {event.loss:.4f}", event.at_s)
        if self._to_redo and event.step == self._to_redo[-1].step:
            again = {s.step: s.exact for s in attempt.steps}
            equal = all(again.get(s.step) == s.exact for s in self._to_redo)
            steps = f"steps {self._to_redo[0].step} to {event.step}"
            self.print_line(
                f"{steps} done again: their losses are {'equal to the last bit' if equal else 'DIFFERENT'}"
            )
            self._to_redo = []

    def _see_log(self, at_unix_s: float, state: LogState) -> None:
        known = {c.sequence for c in self.story.commits}
        for record in state.commits.values():
            if record.slot not in known:
                commit = Commit(at_s=at_unix_s - self._t0, sequence=record.slot, step=record.step)
                self.story.commits.append(commit)
                self.print_line(f"committed step {record.step} as entry {record.slot} of the log", at_unix_s)
        if state.claim is not None and state.claim not in self._claims:
            index = len(self.story.attempts) - 1
            self._claims[state.claim] = index
            before = [c for c in self.story.commits if c.sequence < state.claim]
            if before:
                self._named[index] = before[-1]
                self.print_line(
                    f"a new start claims the root; the log names step {before[-1].step}, entry {before[-1].sequence}"
                )

    def _act(self) -> None:
        if not self._acts or not self.story.attempts:
            return
        act, attempt = self._acts[0], self.story.attempts[-1]
        committed = self.story.commits[-1].step if self.story.commits else 0
        fresh = len(self.story.attempts) > len(self.story.disruptions)
        if not fresh or attempt.last_step < max(act.at_step, committed + act.uncommitted_steps):
            return
        self._acts.pop(0)
        now_unix_s = time.time()
        self.story.disruptions.append(
            Disruption(at_s=now_unix_s - self._t0, name=act.name, node=attempt.node)
        )
        newest = self.story.commits[-1] if self.story.commits else None
        named = f"step {newest.step}, entry {newest.sequence}" if newest else "no commit"
        self.print_line(f"{act.name.upper()} of {attempt.node}: {act.explanation}")
        self.print_line(f"  the job is at step {attempt.last_step}, the log names {named}")
        self._fault = self._executor.submit(act.cause, attempt.node)


def midway(step: int, interval: int) -> int:
    """Return the first step at or after `step` that is as far from the save before it as from the next."""
    return step + (interval // 2 - step) % interval


def _lost(steps: list[StepSeen]) -> str:
    if not steps:
        return "No step was lost"
    return (
        f"{len(steps)} uncommitted steps were lost ({steps[0].step} to {steps[-1].step}) and are done again"
    )
