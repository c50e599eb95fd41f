"""Packets between two ends of a channel."""

import os
import socket

import pytest

from stepkeeper.companion.channel import Channel


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


def test_hanging_up_ends_both_ends() -> None:
    left, right = pair()
    left.shut_down()
    assert left.receive() is None
    assert right.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        right.send({})
    left.close()
    right.close()


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_who_does_not_wait_for_long_is_told_that_the_other_is_behind(timeout_s: float) -> None:
    left, right = pair()

    def send_for_ever() -> None:
        while True:
            left.send({"text": "x" * 1000}, timeout_s=timeout_s)

    with pytest.raises(TimeoutError):
        send_for_ever()
    left.close()
    right.close()
