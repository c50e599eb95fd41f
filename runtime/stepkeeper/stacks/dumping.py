"""Dump the stacks of all ranks, on request or when a step takes far too long. This runs in each rank's companion.

The rank with a reason asks rank 0, which asks all others. Each writes its trainer's stacks into its own log and sends
them to rank 0, which puts all of them into the report. Reasons that come at the same time cause one dump.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from stepkeeper.stacks.mesh import MeshCaller, MeshHost

__all__ = ["REPORT_LIMIT", "Pace", "StackDumper", "shorten_stacks"]

_FACTOR: Final = 10.0
_LEAST_GAPS: Final = 2
"""The number of measured steps without which none is slow: the first ones compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The durations of a training's steps, and the time since the last of them."""

    step: int | None = None
    """The last finished step; None while the trainer makes no steps, as in a restore."""

    since_s: float = 0.0
    """The time of that step's end."""

    n_gaps: int = 0
    """The number of measured durations between two steps. `longest_s` is the longest."""

    longest_s: float = 0.0
    n_noted: int = 0
    """How often the present step was noted as slow. Each time doubles the duration until the next."""

    def see(self, step: int | None, now_s: float) -> Self:
        """Return the pace with `step` as the last finished step."""
        if step == self.step:
            return self
        if step is None or self.step is None:
            return replace(self, step=step, since_s=now_s, n_noted=0)
        longest_s = max(self.longest_s, now_s - self.since_s)
        return replace(self, step=step, since_s=now_s, n_gaps=self.n_gaps + 1, longest_s=longest_s, n_noted=0)

    def slow_from_s(self, least_s: float) -> float | None:
        """Return the time from which the present step is slow, `least_s` after its start at least; None if unknown."""
        if self.step is None or self.n_gaps < _LEAST_GAPS:
            return None
        return self.since_s + max(least_s, _FACTOR * self.longest_s) * 2.0**self.n_noted

    def note(self) -> Self:
        """Return the pace after noting the present step as slow."""
        return replace(self, n_noted=self.n_noted + 1)

    def describe(self, now_s: float) -> str:
        """Describe the slow step as the reason of a dump."""
        no_step = f"no step has followed step {self.step} for {now_s - self.since_s:.0f} s"
        return f"{no_step}, and no step before took longer than {self.longest_s:.1f} s"


REPORT_LIMIT: Final = 16 * 1024
"""Characters for the stacks of all ranks in a report."""

_LEAST_EACH: Final = 1024
_AGAIN_S: Final = 8.0
"""Seconds in which another rank's reason counts as this one's: all ranks notice the hang of one."""

_COLLECT_S: Final = 6.0
"""Seconds for other ranks to answer. One with a held GIL takes two before it is sent a signal."""


class StackDumper:
    """Watch the pace of the training, and dump its stacks when a step is slow or on request."""

    def __init__(
        self, rank: int, read: Callable[[], str], *, least_s: float | None, on_dumped: Callable[[str], None]
    ) -> None:
        """Start the thread. Steps of less than `least_s` are never slow; None: steps aren't watched.

        Rank 0 calls `on_dumped` with the shortened stacks of the ranks that answered.
        """
        self._rank = rank
        self._read = read
        self._least_s = least_s
        self._on_dumped = on_dumped
        self._changed = threading.Condition()
        self._pace = Pace()
        self._reason: str | None = None
        self._is_spread = False
        """True if the reason came from rank 0, which has sent it to all."""

        self._dumped_s = float("-inf")
        self._others: dict[int, str] = {}
        """In rank 0, the stacks that other ranks have sent for the present dump."""

        self.mesh: MeshHost | MeshCaller | None = None
        """The connection to other ranks' companions; None for a process that trains alone or isn't linked yet."""

        threading.Thread(target=self._run, name="stacks", daemon=True).start()

    def link(self, address: Mapping[str, Any]) -> None:
        """Connect with rank 0's companion at the `address` that its trainer described."""
        self.mesh = MeshCaller(self._rank, address, self.receive)

    def see_step(self, step: int | None) -> None:
        """Record the trainer's last finished step; None while it makes no steps."""
        with self._changed:
            before, self._pace = self._pace, self._pace.see(step, time.monotonic())
            if self._pace is not before:
                self._changed.notify_all()

    def ask(self, reason: str) -> None:
        """Dump the stacks of all ranks for this reason."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
                self._changed.notify_all()

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a message of another rank's companion. An unknown message, of a later version, is ignored."""
        if isinstance(reason := message.get("ask"), str):
            with self._changed:
                if self._reason is None and time.monotonic() - self._dumped_s >= _AGAIN_S:
                    # Other ranks are linked with rank 0 only, and it has sent this to all of them.
                    self._reason, self._is_spread = reason, self._rank != 0
                    self._changed.notify_all()
        if isinstance(stacks := message.get("stacks"), str):
            with self._changed:
                self._others[rank] = stacks
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            reason, is_spread = self._await_reason()
            try:
                self._dump(reason, is_spread=is_spread)
            except Exception as error:  # the next dump may succeed
                why = f"dumping stacks failed (because {reason}): {error!r}"
                print(f"stepkeeper: rank {self._rank}: {why}", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
            self._settle()

    def _dump(self, reason: str, *, is_spread: bool) -> None:
        with self._changed:
            self._others = {}
        n_asked = 0 if is_spread or self.mesh is None else self.mesh.send({"ask": reason})
        stacks = self._read() or "its stacks can't be read\n"
        text = f"stepkeeper: rank {self._rank}: the stacks of all its threads, because {reason}:\n{stacks}"
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
        if self._rank == 0:
            self._on_dumped(shorten_stacks(reason, {0: stacks} | self._await_others(n_asked)))
        elif self.mesh is not None:
            self.mesh.send({"stacks": stacks[-REPORT_LIMIT:]})

    def _await_reason(self) -> tuple[str, bool]:
        """Wait for a reason. Return it, and whether rank 0 has already sent it to all others."""
        with self._changed:
            while self._reason is None:
                from_s = None if self._least_s is None else self._pace.slow_from_s(self._least_s)
                left_s = None if from_s is None else from_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._reason = self._pace.describe(time.monotonic())
                    self._pace = self._pace.note()
                else:
                    self._changed.wait(left_s)
            return self._reason, self._is_spread

    def _settle(self) -> None:
        """Mark the dump as done, also for the slow step that this rank would find by itself in a moment."""
        now_s = time.monotonic()
        with self._changed:
            self._dumped_s, self._reason, self._is_spread = now_s, None, False
            from_s = None if self._least_s is None else self._pace.slow_from_s(self._least_s)
            if from_s is not None and from_s - now_s < _AGAIN_S:
                self._pace = self._pace.note()

    def _await_others(self, n_asked: int) -> dict[int, str]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._others) >= n_asked, _COLLECT_S)
            return dict(self._others)


def shorten_stacks(reason: str, stacks: Mapping[int, str], limit: int = REPORT_LIMIT) -> str:
    """Join the stacks of several ranks into one text of `limit` characters at most. Pure.

    Of each rank the end is kept, where the main thread is. If there are very many ranks, only the first are included.
    """
    parts = [f"because {reason}\n"]
    each = max(_LEAST_EACH, (limit - len(parts[0])) // max(1, len(stacks)))
    for rank, text in sorted(stacks.items()):
        title = f"rank {rank}:\n"
        kept = text[-(each - len(title)) :]
        if sum(map(len, parts)) + len(title) + len(kept) > limit:
            break
        parts += [title, kept]
    return "".join(parts)[:limit]
