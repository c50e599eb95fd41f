"""Packets between two ends of a channel."""

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stepkeeper.companion import channel
from stepkeeper.companion.channel import Channel, Outbox


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


@pytest.mark.parametrize("size", [10, 40_000, 5_000_000])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    left, right = pair()
    left.send({"text": "x" * size, "n": [1, None]})
    packet = right.receive()
    assert packet is not None
    assert packet.message == {"text": "x" * size, "n": [1, None]}
    left.close()
    assert right.receive() is None
    right.close()


def test_file_descriptors_come_along() -> None:
    left, right = pair()
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    for size in (1, 100_000):
        left.send({"text": "x" * size}, [fd])
        packet = right.receive()
        assert packet is not None
        (received,) = packet.fds
        assert os.pread(received, 10, 0) == b"shared"
        os.close(received)
    os.close(fd)
    left.close()
    right.close()


def test_a_child_that_is_forked_while_a_message_is_sent_does_not_keep_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = pair()
    codes: list[int] = []

    def fork(channel: Channel, parts: object, fds: Sequence[int], timeout_s: float | None) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(Path(f"/proc/self/fd/{fds[-1]}").exists())
        codes.append(os.waitpid(pid, 0)[1])
        os.fstat(fds[-1])

    monkeypatch.setattr(Channel, "_send", fork)
    left.send({"text": "x" * 100_000})
    assert codes == [0]
    left.close()
    right.close()


class Ended:
    """A process that has ended, by a descriptor or without."""

    def __init__(self, end_fd: int | None = None, last: Callable[[], None] = lambda: None) -> None:
        self.end_fd = end_fd
        self._last = last

    def has_ended(self) -> bool:
        self._last()
        return True


def test_nothing_is_waited_for_from_a_process_that_has_ended_whoever_holds_the_other_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_LOOK_AGAIN_MILLIS", 1)
    left, right = pair()
    told, tells = os.pipe()
    os.close(tells)
    assert left.receive(Ended()) is None
    assert left.receive(Ended(told)) is None
    os.close(told)
    right.send({"n": 1})
    packet = left.receive(Ended())
    assert packet is not None, "what it has sent before is received"
    assert packet.message == {"n": 1}
    assert left.receive(Ended()) is None
    left.close()
    right.close()


def test_what_a_process_sent_between_the_looks_at_its_socket_and_at_its_end_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_LOOK_AGAIN_MILLIS", 1)
    left, right = pair()
    assert left.receive(Ended(last=lambda: right.send({"n": 1}))) is not None
    left.close()
    right.close()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    channels = pair()
    yield channels
    for each in channels:
        each.close()


def fill(channel: Channel) -> int:
    """Fill the socket, and return the number of messages that it holds."""
    for number in itertools.count():
        try:
            channel.send({"filler": number}, timeout_s=0.0)
        except TimeoutError:
            return number
    raise AssertionError


def test_messages_that_have_to_arrive_are_kept_while_the_trainer_takes_none(
    ends: tuple[Channel, Channel],
) -> None:
    companion, trainer = ends
    outbox = Outbox(companion)
    n_fillers = fill(companion)
    outbox.offer({"directive": {}})
    for number in range(3):
        outbox.send({"id": number, "body": {}})
    packets = [trainer.receive() for _ in range(n_fillers + 3)]
    messages = [packet.message for packet in packets if packet is not None]
    assert messages[n_fillers:] == [{"id": number, "body": {}} for number in range(3)]
    outbox.offer({"directive": {}})
    last = trainer.receive()
    assert last is not None
    assert last.message == {"directive": {}}, "a directive is lost only while there is no room for it"


def test_a_message_to_a_trainer_that_is_gone_is_no_error(ends: tuple[Channel, Channel]) -> None:
    companion, trainer = ends
    outbox = Outbox(companion)
    trainer.shut_down()
    outbox.send({"id": 1, "body": {}})
    outbox.offer({"directive": {}})
