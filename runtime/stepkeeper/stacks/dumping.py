"""Dump the stacks of all ranks, on request or when a step takes far too long. This runs in each rank's companion.

The rank with a reason asks rank 0, which asks all others. Each writes its trainer's stacks into its own log and sends
them to rank 0, which puts all of them into the report. Reasons that come at the same time cause one dump. Where the job
has limits for hangs, rank 0 alone decides that the training hangs, by its own steps: others stop with it.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, Final

from stepkeeper.contract import Hang
from stepkeeper.stacks.mesh import MeshCaller, MeshHost
from stepkeeper.stacks.naming import RankStacks, Source, name_hang
from stepkeeper.stacks.pace import Pace, PaceLimits, Stage

__all__ = ["StackDumper", "shorten_stacks"]

REPORT_LIMIT: Final = 16 * 1024
"""Characters for the stacks of all ranks in a report, and for those of one rank in a message."""

HANG_LIMIT: Final = 32 * 1024
"""Characters for the stacks of all ranks in the report of a hang."""

_LEAST_EACH: Final = 1024
_MAX_RANKS: Final = 64
"""The number of ranks that a report of a hang names at most."""

_AGAIN_S: Final = 8.0
"""Seconds in which another rank's reason counts as this one's: all ranks notice the hang of one."""

_COLLECT_S: Final = 6.0
"""Seconds for other ranks to answer. One with a held GIL takes two before it is sent a signal."""


class StackDumper:
    """Watch the pace of the training, and dump its stacks when a step is slow or on request."""

    def __init__(
        self,
        rank: int,
        read: Callable[[], RankStacks],
        *,
        limits: PaceLimits,
        on_dumped: Callable[[str], None],
        on_hang: Callable[[Hang | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread, which watches the trainer by these `limits`.

        Rank 0 calls `on_dumped` with the shortened stacks of the ranks that answered. If the training hangs, it calls
        `on_hang` instead, and calls it with None once the training moves, in the thread that records that.
        """
        self._rank = rank
        self._read = read
        self._limits = limits
        self._on_dumped = on_dumped
        self._on_hang = on_hang
        self._changed = threading.Condition()
        self._clock = clock
        self._pace = Pace(since_s=clock())
        self._reason: str | None = None
        self._is_spread = False
        """True if the reason came from rank 0, which has sent it to all."""

        self._hangs = False
        """In rank 0: True while the training is known to hang."""

        self._began_s = self._dumped_s = float("-inf")
        """When the last dump began, and ended."""

        self._stacks: dict[int, RankStacks] = {}
        """In rank 0, the stacks that ranks have sent for the present dump."""

        self.mesh: MeshHost | MeshCaller | None = None
        """The connection to other ranks' companions; None for a process that trains alone or isn't linked yet."""

        threading.Thread(target=self._run, name="stacks", daemon=True).start()

    def link(self, address: Mapping[str, Any]) -> None:
        """Connect with rank 0's companion at the `address` that its trainer described."""
        self.mesh = MeshCaller(self._rank, address, self.receive)

    def see(self, stage: Stage | None, step: int | None) -> None:
        """Record the trainer's stage, None while it makes steps, and its last finished step."""
        with self._changed:
            before, self._pace = self._pace, self._pace.see(stage, step, self._clock())
            if self._pace is before:
                return
            if self._hangs:
                self._on_hang(None)
            self._hangs = False
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
                if self._reason is None and self._clock() - self._dumped_s >= _AGAIN_S:
                    # Other ranks are linked with rank 0 only, and it has sent this to all of them.
                    self._reason, self._is_spread = reason, self._rank != 0
                    self._changed.notify_all()
        if isinstance(stacks := message.get("stacks"), str):
            with self._changed:
                source = next((each for each in Source if each == message.get("source")), Source.PYTHON)
                about = {name: str(message.get(name, "")) for name in ("state", "line")}
                self._stacks[rank] = RankStacks(text=stacks, source=source, **about)
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
            pace = self._pace
            hangs = self._watches_hangs and pace.n_noted > 0
            # Another rank noticed it a moment ago. All have been dumped for that, and answer no second time.
            is_dumped = hangs and self._clock() - self._dumped_s < _AGAIN_S and self._began_s >= pace.since_s
            if not is_dumped:
                self._began_s, self._stacks = self._clock(), {}
        if not is_dumped:
            self._dump_all(reason, is_spread=is_spread)
        if self._rank != 0:
            return
        with self._changed:
            stacks = dict(self._stacks)
        if hangs:
            self._report_hang(reason, stacks, pace)
        else:
            self._on_dumped(shorten_stacks(reason, {rank: own.text for rank, own in stacks.items()}))

    def _dump_all(self, reason: str, *, is_spread: bool) -> None:
        """Dump this rank's stacks, and in rank 0 gather those of the others."""
        n_asked = 0 if is_spread or self.mesh is None else self.mesh.send({"ask": reason})
        own = self._read()
        stacks = own.text or "its stacks can't be read\n"
        text = f"stepkeeper: rank {self._rank}: the stacks of all its threads, because {reason}:\n{stacks}"
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
        if self._rank != 0:
            if self.mesh is not None:
                self.mesh.send(asdict(own) | {"stacks": stacks[-REPORT_LIMIT:], "text": None})
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._stacks) >= n_asked, _COLLECT_S)
            self._stacks[0] = own

    def _report_hang(self, reason: str, stacks: Mapping[int, RankStacks], pace: Pace) -> None:
        """Name and report the hang, unless the training has moved since."""
        known = self.mesh.known if isinstance(self.mesh, MeshHost) else set()
        named = name_hang(stacks, missing=known - stacks.keys())
        texts = {rank: own.text for rank, own in stacks.items()}
        hang = Hang(
            kind=named.kind,
            since_unix_s=int(time.time() - (self._clock() - pace.since_s)),
            ranks=named.ranks[:_MAX_RANKS],
            text=named.text,
            stacks=shorten_stacks(reason, texts, HANG_LIMIT, first=named.ranks),
        )
        text = f"stepkeeper: rank 0: the training hangs ({hang.kind}), because {reason}: {hang.text}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
        with self._changed:
            # Later dumps of the same hang have nothing new.
            if self._pace is pace and not self._hangs:
                self._hangs = True
                self._on_hang(hang)

    @property
    def _watches_hangs(self) -> bool:
        return self._rank == 0 and self._limits.hang is not None

    def _await_reason(self) -> tuple[str, bool]:
        """Wait for a reason. Return it, and whether rank 0 has already sent it to all others."""
        with self._changed:
            while self._reason is None:
                from_s = self._pace.slow_from_s(self._limits)
                left_s = None if from_s is None else from_s - self._clock()
                if left_s is not None and left_s <= 0:
                    self._reason = self._pace.describe(self._clock())
                    self._pace = self._pace.note()
                else:
                    self._changed.wait(left_s)
            return self._reason, self._is_spread

    def _settle(self) -> None:
        """Mark the dump as done, also for the slow step that this rank would find by itself in a moment."""
        now_s = self._clock()
        with self._changed:
            self._dumped_s, self._reason, self._is_spread = now_s, None, False
            from_s = self._pace.slow_from_s(self._limits)
            # A hang is still to be reported, when it is due: by these stacks.
            is_open = self._watches_hangs and self._pace.n_noted == 0
            if from_s is not None and from_s - now_s < _AGAIN_S and not is_open:
                self._pace = self._pace.note()


def shorten_stacks(
    reason: str, stacks: Mapping[int, str], limit: int = REPORT_LIMIT, *, first: Collection[int] = ()
) -> str:
    """Join the stacks of several ranks into one text of `limit` characters at most, the ranks `first` first. Pure.

    Of each rank the end is kept, where the main thread is. If there are very many ranks, the last are left out.
    """
    parts = [f"because {reason}\n"]
    each = max(_LEAST_EACH, (limit - len(parts[0])) // max(1, len(stacks)))
    for rank, text in sorted(stacks.items(), key=lambda item: (item[0] not in first, item[0])):
        title = f"rank {rank}:\n"
        kept = text[-(each - len(title)) :]
        if sum(map(len, parts)) + len(title) + len(kept) > limit:
            break
        parts += [title, kept]
    return "".join(parts)[:limit]
