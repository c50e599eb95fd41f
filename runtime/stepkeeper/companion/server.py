"""The companion's two threads of control: one hears what is asked, one does it. What can wait is done aside."""

import contextlib
import errno
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from stepkeeper.companion.background import Aside, Work
from stepkeeper.companion.channel import Channel, Packet
from stepkeeper.companion.messages import (
    Begin,
    Close,
    Commit,
    Kind,
    Open,
    Quarantine,
    Restored,
    Upload,
    Void,
    Write,
)
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.companion.session import Session
from stepkeeper.contract import ContractError, Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.error_codec import encode_error
from stepkeeper.errors import CompanionError
from stepkeeper.loggers import identify

__all__ = ["serve"]

_SOCKET_GONE: Final = 0
_BROKEN: Final = 70

_OF_A_SAVE: Final = (Kind.STAGE, Kind.UPLOAD, Kind.WRITE, Kind.COMMIT, Kind.VOID)
"""Go before what comes after earlier commits. All else waits for that: who restores must not choose what it deletes."""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_MOST_BEHIND: Final = 8
"""Commits after which another save is begun though what comes after them isn't done."""


def serve(socket_fd: int, trainer_pid: int) -> None:
    """Answers requests until the trainer closes the socket or is dead; then this process is gone at once.

    What was not finished by then never will be: a commit that isn't in the log is no commit.
    """
    end = socket.socket(fileno=socket_fd)
    channel = Channel(end)
    server = _Server(channel)
    threading.Thread(target=server.work, name="requests", daemon=True).start()
    trainer_fd = _pidfd(trainer_pid)
    # Not select(): the socket may have a high number, from a trainer with a thousand files open.
    watched = select.poll()
    for fd in (end.fileno(),) if trainer_fd is None else (end.fileno(), trainer_fd):
        watched.register(fd, select.POLLIN)
    while True:
        if end.fileno() not in {fd for fd, _ in watched.poll()}:
            # Dead, though a forked child of it still holds the socket.
            break
        packet = channel.receive()
        if packet is None:
            break
        server.hear(packet)
    os._exit(_SOCKET_GONE)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(_SOCKET_GONE)
    except OSError:
        # A sandbox without the call: the socket alone tells.
        return None


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._heard: queue.SimpleQueue[Packet | None] = queue.SimpleQueue()
        """None: what is done aside can go on."""

        self._requests: list[Packet] = []
        self._aside = Aside(lambda: self._heard.put(None))
        self._session: Session | None = None
        self._state: TrainerState | None = None
        """None before the trainer has told it."""

        self._put_off: Packet | None = None
        """Tried again once all is gone that can go: there was no room."""

        self._flush_from_s: float | None = None
        self._close_by_s = 0.0

    def hear(self, packet: Packet) -> None:
        """The state is taken over at once, everything else is queued."""
        if packet.message["kind"] != Kind.STATE:
            self._heard.put(packet)
            return
        try:
            self._state = decode(TrainerState, packet.message["body"])
        except ContractError:
            # Of the trainer's state reports live, not saves.
            traceback.print_exc()
            return
        if self._session is not None and self._session.reporter is not None:
            self._session.reporter.update(self._state)

    def work(self) -> None:
        """Never returns. What goes wrong outside a request ends the process, which the trainer sees."""
        try:
            while True:
                self.turn()
        except BaseException:
            traceback.print_exc()
            os._exit(_BROKEN)

    def turn(self) -> None:
        """A request is answered; or what comes after commits has gone on, or something was heard."""
        while not self._heard.empty():
            self._queue(self._heard.get())
        packet = next(filter(self._may_be_answered, self._requests), None)
        if packet is not None:
            self._requests.remove(packet)
            self._answer(packet)
        elif self._aside.ready:
            self._aside.go_on()
        else:
            self._listen()

    def _listen(self) -> None:
        timeout_s = None
        if self._flush_from_s is not None:
            timeout_s = max(0.0, self._flush_from_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._queue(self._heard.get(timeout=timeout_s))

    def _queue(self, packet: Packet | None) -> None:
        if packet is None:
            return
        self._requests.append(packet)
        if packet.message["kind"] == Kind.CLOSE:
            now_s = time.monotonic()
            within_s = decode(Close, packet.message["body"]).within_millis / 1000
            self._flush_from_s, self._close_by_s = now_s + within_s / 2, now_s + within_s

    def _may_be_answered(self, packet: Packet) -> bool:
        """True unless what comes after commits goes first."""
        n_works, kind = self._aside.n_works, packet.message["kind"]
        if packet is self._put_off:
            return n_works == 0
        if kind in (Kind.STAGE, Kind.WRITE):
            return n_works < _MOST_BEHIND
        if kind == Kind.CLOSE and self._flush_from_s is not None:
            return n_works == 0 or time.monotonic() >= self._flush_from_s
        return n_works == 0 or kind in _OF_A_SAVE

    def _answer(self, packet: Packet) -> None:
        after: Work | None = None
        try:
            body, after = self._do(Kind(packet.message["kind"]), packet.message["body"], packet.fds)
            answer: dict[str, Any] = {"body": body}
        except Exception as error:  # it is the trainer's to judge
            if self._puts_off(packet, error):
                return
            answer = {"error": encode_error(error, with_traceback=True)}
        self._put_off = None
        for fd in packet.fds:
            os.close(fd)
        self._send({"id": packet.message["id"], **answer})
        if after is not None:
            self._aside.add(after)

    def _puts_off(self, packet: Packet, error: Exception) -> bool:
        """Whether `packet` is answered later: what has failed for want of room may not, once all is gone that can."""
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
        if not is_full or packet.message["kind"] not in (Kind.WRITE, Kind.UPLOAD) or packet is self._put_off:
            return False
        room = None if self._session is None else self._session.make_room()
        if room is not None:
            self._aside.add(room)
        self._put_off = packet
        self._requests.insert(0, packet)
        return True

    def _do(
        self, kind: Kind, raw: dict[str, Any], fds: tuple[int, ...]
    ) -> tuple[dict[str, Any], Work | None]:
        """The answer's body, and what is to be done once it is sent."""
        if kind is Kind.OPEN:
            opening = decode(Open, raw)
            identity = opening.identity
            identify(rank=opening.rank, attempt=None if identity is None else identity.attempt)
            opened = Session(opening, self._direct, on_complaint=self._complain)
            opened.resume()
            self._session = opened
            # What was told before this moment wasn't passed on, what is told after it is; in between, both do it.
            if opened.reporter is not None and self._state is not None:
                opened.reporter.update(self._state)
            return {}, None
        session = self._session
        if session is None:
            raise CompanionError(f"asked to {kind} before anything was opened")
        if kind is Kind.COMMIT:
            committed, after = session.commit(decode(Commit, raw))
            return encode(committed), after
        do: dict[Kind, Callable[[], object]] = {
            Kind.BEGIN: lambda: session.begin(decode(Begin, raw)),
            Kind.REFRESH: session.refresh,
            Kind.QUARANTINE: lambda: session.quarantine(decode(Quarantine, raw)),
            Kind.RESTORED: lambda: session.restored(decode(Restored, raw)),
            Kind.WRITE: lambda: session.write(decode(Write, raw), fds[0]),
            Kind.STAGE: lambda: session.stage(decode(Write, raw), fds[0]),
            Kind.UPLOAD: lambda: session.upload(decode(Upload, raw)),
            Kind.VOID: lambda: session.void(decode(Void, raw)),
            Kind.CLOSE: lambda: self._close(session),
        }
        answer = do[kind]()
        return ({} if answer is None else encode(answer)), None

    def _close(self, session: Session) -> None:
        """The last report was answered, or the time is up."""
        self._flush_from_s = None
        if self._aside.n_works:
            left = "closed before all was deleted that can be: the first save of the next start does that"
            print(f"stepkeeper: {left}", file=sys.stderr, flush=True)  # noqa: T201  # a process's own log
        session.flush(max(0.0, self._close_by_s - time.monotonic()))

    def _complain(self, text: str | None) -> None:
        self._send({"complaint": text})

    def _direct(self, directive: Directive) -> None:
        self._send({"directive": encode(directive)})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            # The trainer is gone, and this process with it as soon as the other thread sees that.
            return
