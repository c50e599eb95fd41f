"""Messages to a trainer that receives nothing for a while: no thread waits, and no answer is lost."""

import itertools
import socket
from collections.abc import Iterator

import pytest

from stepkeeper.companion.channel import Channel, Outbox


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = (Channel(ours), Channel(theirs))
    yield channels
    for channel in channels:
        channel.close()


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
