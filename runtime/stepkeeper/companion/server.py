"""Answer the trainer's requests in the companion process, and run background tasks between them.

The tasks are the upkeep (checks and deletions) after each commit, and deletions for a save that lacks room.
"""

import contextlib
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from stepkeeper.companion.background import BackgroundTask, TaskQueue
from stepkeeper.companion.channel import Outbox, Packet
from stepkeeper.companion.messages import (
    ClaimRequest,
    CloseRequest,
    CommitRequest,
    Kind,
    OpenRequest,
    QuarantineRequest,
    UploadRequest,
    VerifiedNotice,
    VoidRequest,
    WriteRequest,
)
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.companion.session import Session
from stepkeeper.contract import ContractError, Directive, ReportPhase
from stepkeeper.contract.wire import decode, encode
from stepkeeper.ending.message import write_for_killed
from stepkeeper.errors import CompanionError, encode_error
from stepkeeper.loggers import identify
from stepkeeper.stacks.dumping import StackDumper
from stepkeeper.stacks.reading import open_stacks
from stepkeeper.storage.base import is_full
from stepkeeper.storage.moved import moved

__all__ = ["Server"]

_BROKEN: Final = 70
"""The exit code after an error outside a request: EX_SOFTWARE of sysexits.h."""

_OF_A_SAVE: Final = (Kind.STAGE, Kind.UPLOAD, Kind.WRITE, Kind.COMMIT, Kind.VOID)
"""Requests that are answered before the upkeep after earlier commits. All others wait for it: a restore must not choose
a commit that the upkeep is about to delete.
"""

_COUNTER_PLACES: Final = {Kind.WRITE: 1, Kind.STAGE: 1, Kind.UPLOAD: 0}
"""By request, the index of the file descriptor with the memory for the count of moved bytes."""

_MOST_BEHIND: Final = 8
"""Number of commits whose upkeep may be pending when another save starts."""


class Server:
    """Answer requests one at a time, in one thread. Another thread receives them."""

    def __init__(self, outbox: Outbox, signal_trainer: Callable[[int], None] = lambda _number: None) -> None:
        self._outbox = outbox
        self._signal_trainer = signal_trainer
        self._stacks: StackDumper | None = None
        self._inbox: queue.SimpleQueue[Packet | None] = queue.SimpleQueue()
        """Received packets; None means that a background task can advance."""

        self._requests: list[Packet] = []
        """Requests that have no answer yet, in the order in which they came."""

        self._tasks = TaskQueue(lambda: self._inbox.put(None))
        self._opening: OpenRequest | None = None
        self._session: Session | None = None
        self._state: TrainerState | None = None
        """The trainer's state; None before the trainer has sent it."""

        self._postponed: Packet | None = None
        """A request that failed for lack of room. It is retried once all deletable data is deleted."""

        self._flush_from_s: float | None = None
        """Time from which a request to close doesn't wait for tasks; None without such a request."""

        self._close_by_s = 0.0
        """Time at which that request has to be answered."""

    def receive_packet(self, packet: Packet) -> None:
        """Handle a packet in the receiving thread: the trainer's state and LINK at once. Queue every other one."""
        if packet.message["kind"] == Kind.LINK:
            # It arrives after the answer to the opening, so there are stacks if the opening requested them.
            if self._stacks is not None:
                self._stacks.link(packet.message["body"])
            return
        if packet.message["kind"] != Kind.STATE:
            self._inbox.put(packet)
            return
        try:
            self._state = decode(TrainerState, packet.message["body"])
        except ContractError:
            # Only reports need the trainer's state; saves continue without it.
            traceback.print_exc()
            return
        if self._session is not None and self._session.reporter is not None:
            self._session.reporter.update_state(self._state)
        if self._stacks is not None:
            # A restore, or the last save, is no slow step.
            is_training = self._state.phase is ReportPhase.TRAINING
            self._stacks.see_step(self._state.step if is_training else None)

    def write_message_of_killed(self, number: int) -> None:
        """Write the termination message of a trainer that signal `number` killed, unless it had a notice."""
        opening, state = self._opening, self._state or TrainerState()
        if opening is not None and opening.identity is not None and state.notice is None:
            write_for_killed(opening.identity, opening.rank, number, step=state.step, restored=state.restored)

    def run_forever(self) -> None:
        """Answer requests, and never return. An error outside a request ends the process, which the trainer notices."""
        try:
            while True:
                self.run_once()
        except BaseException:
            traceback.print_exc()
            os._exit(_BROKEN)

    def run_once(self) -> None:
        """Answer one request, or else advance a background task, or else wait for a packet."""
        while not self._inbox.empty():
            self._enqueue(self._inbox.get())
        packet = next(filter(self._may_be_answered, self._requests), None)
        if packet is not None:
            self._requests.remove(packet)
            self._answer(packet)
        elif self._tasks.can_advance:
            self._tasks.advance()
            # A request that waits for this task, for room for example, isn't stuck.
            moved.note(1)
        else:
            self._await_packet()

    def _await_packet(self) -> None:
        timeout_s = None
        if self._flush_from_s is not None:
            timeout_s = max(0.0, self._flush_from_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._enqueue(self._inbox.get(timeout=timeout_s))

    def _enqueue(self, packet: Packet | None) -> None:
        if packet is None:
            return
        self._requests.append(packet)
        if packet.message["kind"] == Kind.CLOSE:
            now_s = time.monotonic()
            within_s = decode(CloseRequest, packet.message["body"]).within_millis / 1000
            self._flush_from_s, self._close_by_s = now_s + within_s / 2, now_s + within_s

    def _may_be_answered(self, packet: Packet) -> bool:
        """Return whether `packet` may be answered now, before the pending upkeep."""
        n_tasks, kind = self._tasks.n_tasks, packet.message["kind"]
        if packet is self._postponed:
            return n_tasks == 0
        if kind in (Kind.STAGE, Kind.WRITE):
            # Otherwise a training that saves faster than old commits are deleted would fill the store.
            return n_tasks < _MOST_BEHIND
        if kind == Kind.CLOSE and self._flush_from_s is not None:
            return n_tasks == 0 or time.monotonic() >= self._flush_from_s
        return n_tasks == 0 or kind in _OF_A_SAVE

    def _answer(self, packet: Packet) -> None:
        after: BackgroundTask | None = None
        try:
            body, after = self._dispatch(Kind(packet.message["kind"]), packet.message["body"], packet.fds)
            answer: dict[str, Any] = {"body": body}
        except Exception as error:  # the trainer handles it
            if self._postpone_for_room(packet, error):
                return
            answer = {"error": encode_error(error, with_traceback=True)}
        self._postponed = None
        for fd in packet.fds:
            os.close(fd)
        self._outbox.send({"id": packet.message["id"], **answer})
        if after is not None:
            self._tasks.add_task(after)

    def _postpone_for_room(self, packet: Packet, error: Exception) -> bool:
        """Postpone `packet` and return True if it failed for lack of room that deletions may make."""
        writes_data = packet.message["kind"] in (Kind.WRITE, Kind.UPLOAD)
        if not writes_data or not is_full(error) or packet is self._postponed:
            return False
        room = None if self._session is None else self._session.make_room()
        if room is not None:
            self._tasks.add_task(room)
        self._postponed = packet
        self._requests.insert(0, packet)
        return True

    def _dispatch(
        self, kind: Kind, raw: dict[str, Any], fds: tuple[int, ...]
    ) -> tuple[dict[str, Any], BackgroundTask | None]:
        """Carry out the request. Return the answer's body, and a task to start after the answer is sent."""
        if kind is Kind.OPEN:
            self._opening = opening = decode(OpenRequest, raw)
            identity = opening.identity
            identify(rank=opening.rank, attempt=None if identity is None else identity.attempt)
            opened = Session(opening, self._send_directive, on_complaint=self._send_complaint)
            opened.resume_claim()
            self._session = opened
            # The receiving thread forwards states that come from now on. This one may have come before.
            if opened.reporter is not None and self._state is not None:
                opened.reporter.update_state(self._state)
            self._open_stacks(opening, fds)
            return {}, None
        session = self._session
        if session is None:
            raise CompanionError(f"request {kind} before a root was opened")
        if (place := _COUNTER_PLACES.get(kind)) is not None and len(fds) > place:
            moved.share(fds[place])
        if kind is Kind.COMMIT:
            committed, after = session.commit_save(decode(CommitRequest, raw))
            return encode(committed), self._notify_at_end(after, committed.record.slot)
        do: dict[Kind, Callable[[], object]] = {
            Kind.CLAIM: lambda: session.claim_root(decode(ClaimRequest, raw)),
            Kind.REFRESH: session.refresh_head,
            Kind.QUARANTINE: lambda: session.quarantine_commit(decode(QuarantineRequest, raw)),
            Kind.VERIFIED: lambda: session.mark_verified(decode(VerifiedNotice, raw)),
            Kind.WRITE: lambda: session.shares.write_share(decode(WriteRequest, raw), fds[0]),
            Kind.STAGE: lambda: session.shares.stage_share(decode(WriteRequest, raw), fds[0]),
            Kind.UPLOAD: lambda: session.shares.upload_share(decode(UploadRequest, raw)),
            Kind.VOID: lambda: session.void_save(decode(VoidRequest, raw)),
            Kind.CLOSE: lambda: self._close(session),
        }
        answer = do[kind]()
        return ({} if answer is None else encode(answer)), None

    def _open_stacks(self, opening: OpenRequest, fds: tuple[int, ...]) -> None:
        if opening.stacks is not None:
            self._stacks = open_stacks(
                opening.stacks,
                opening.rank,
                fds,
                ask=lambda number: self._outbox.offer({"stacks": number}),
                signal_trainer=self._signal_trainer,
                on_dumped=self._report_stacks,
            )

    def _report_stacks(self, text: str) -> None:
        if self._session is not None and self._session.reporter is not None:
            self._session.reporter.add_stacks(text)

    def _close(self, session: Session) -> None:
        """Wait for the answer to the last report, until the time is up."""
        self._flush_from_s = None
        if self._tasks.n_tasks:
            left = "closed before all deletions were done: the first save of the next start does the rest"
            print(f"stepkeeper: {left}", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
        session.await_last_report(max(0.0, self._close_by_s - time.monotonic()))

    def _notify_at_end(self, task: BackgroundTask, slot: int) -> BackgroundTask:
        """Run the upkeep after a commit, and notify the trainer at its end."""
        yield from task
        self._outbox.send({"upkept": slot})

    def _send_complaint(self, text: str | None) -> None:
        self._outbox.send({"complaint": text})

    def _send_directive(self, directive: Directive) -> None:
        if directive.dump_stacks and self._stacks is not None:
            # Not by the trainer, which may hang: stacks are most useful then.
            self._stacks.ask("the operator requested them")
        # The operator repeats the directive in each answer as long as it is valid.
        self._outbox.offer({"directive": encode(directive)})
