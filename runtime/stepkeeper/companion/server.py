"""The companion's two threads of control: one hears what is asked, one does it, in that order."""

import os
import queue
import select
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

from stepkeeper.companion.channel import Channel, Packet
from stepkeeper.companion.messages import Begin, Close, Commit, Kind, Open, Quarantine, Restored, Void, Write
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.companion.session import Session
from stepkeeper.contract import ContractError, Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import CompanionError

__all__ = ["serve"]

_SOCKET_GONE: Final = 0
_BROKEN: Final = 70


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
        self._requests: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self._session: Session | None = None
        self._state: TrainerState | None = None
        """None before the trainer has told it."""

    def hear(self, packet: Packet) -> None:
        """The state is taken over at once, everything else is queued."""
        if packet.message["kind"] != Kind.STATE:
            self._requests.put(packet)
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
                self._answer(self._requests.get())
        except BaseException:
            traceback.print_exc()
            os._exit(_BROKEN)

    def _answer(self, packet: Packet) -> None:
        after: Callable[[], None] | None = None
        try:
            body, after = self._do(Kind(packet.message["kind"]), packet.message["body"], packet.fds)
            answer: dict[str, Any] = {"body": body}
        except Exception as error:  # it is the trainer's to judge
            answer = {"error": _told(error)}
        finally:
            for fd in packet.fds:
                os.close(fd)
        self._send({"id": packet.message["id"], **answer})
        if after is not None:
            after()

    def _do(
        self, kind: Kind, raw: dict[str, Any], fds: tuple[int, ...]
    ) -> tuple[dict[str, Any], Callable[[], None] | None]:
        """The answer's body, and what is to be done once it is sent."""
        if kind is Kind.OPEN:
            opened = Session(decode(Open, raw), self._direct)
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
            Kind.VOID: lambda: session.void(decode(Void, raw)),
            Kind.CLOSE: lambda: session.flush(decode(Close, raw).flush_millis / 1000),
        }
        answer = do[kind]()
        return ({} if answer is None else encode(answer)), None

    def _direct(self, directive: Directive) -> None:
        self._send({"directive": encode(directive)})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            # The trainer is gone, and this process with it as soon as the other thread sees that.
            return


def _told(error: Exception) -> dict[str, str]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
