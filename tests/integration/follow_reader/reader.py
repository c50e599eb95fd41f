"""Follow a root as an evaluator does, and be told to stop in the way that the second argument says."""

import hashlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Final

import torch

import stepkeeper
from stepkeeper.follower import FollowedCommit

URI: Final = sys.argv[1]
LONG_S: Final = 300.0


def say(text: str) -> None:
    print(text, flush=True)


def read(commit: FollowedCommit) -> None:
    commit.load({"w": torch.zeros(8)})
    say(f"read {commit.step}")


def waits() -> None:
    with stepkeeper.follow(URI, poll_s=0.05) as commits:
        for commit in commits:
            read(commit)
            time.sleep(LONG_S)


def computes_without_a_break() -> None:
    """The main thread runs no bytecode for minutes, as when a model is compiled: no handler of Python's runs then."""
    for commit in stepkeeper.follow(URI, poll_s=0.05):
        read(commit)
        hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**30)


def has_a_handler_that_closes() -> None:
    told = threading.Event()
    follower = stepkeeper.follow(URI, poll_s=0.05)

    def close(number: int, frame: FrameType | None) -> None:
        follower.close()
        told.set()

    signal.signal(signal.SIGTERM, close)
    for commit in follower:
        read(commit)
        assert told.wait(LONG_S)
    say("left the loop")


if __name__ == "__main__":
    modes = (waits, computes_without_a_break, has_a_handler_that_closes)
    {each.__name__: each for each in modes}[sys.argv[2]]()
