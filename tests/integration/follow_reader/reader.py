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
from stepkeeper import CheckpointManager
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


def reads_with_two() -> None:
    with stepkeeper.follow(URI, poll_s=0.05) as one, stepkeeper.follow(URI, poll_s=0.05) as other:
        next(one)
        read(next(other))
        time.sleep(LONG_S)


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


def has_a_manager() -> None:
    """SIGTERM is the manager's notice: the program goes on to a step that it can save."""
    follower = stepkeeper.follow(URI, poll_s=0.05)
    read(next(follower))
    with CheckpointManager(URI + "-own", save=1) as manager:
        state = {"w": torch.ones(8)}
        step, is_over = 0, False
        while not is_over:
            step += 1
            is_over = manager.step(step, state).stop
            if step == 1:
                say("trains")
            time.sleep(0.01)


if __name__ == "__main__":
    modes = (waits, computes_without_a_break, reads_with_two, has_a_handler_that_closes, has_a_manager)
    {each.__name__: each for each in modes}[sys.argv[2]]()
