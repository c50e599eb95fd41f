"""Test where the tests' servers listen that another process starts later."""

import socket
from pathlib import Path

import pytest
from free_ports import free_port


def test_it_is_none_that_the_kernel_gives_to_whoever_asks_for_any() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port() <= last for _ in range(100))


def test_one_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken, free = server.getsockname()[1], free_port()
        chosen = iter((taken, free))
        monkeypatch.setattr("random.SystemRandom.choice", lambda *_: next(chosen))
        assert free_port() == free
