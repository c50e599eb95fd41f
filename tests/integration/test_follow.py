"""An evaluator beside a training: what it is told, and that the training's root is as it was."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fork_server import ForkedProcess, ForkServer

import stepkeeper
from stepkeeper.errors import StorageError
from stepkeeper.log import Log
from stepkeeper.retention.pins import list_pins
from stepkeeper.storage import open_store
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.trainer import open_manager

LIMIT_S: Final = 60


def state_at(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((8,), float(step)), "b": torch.full((2,), -float(step))},
        "position": step,
    }


def pinned(uri: str) -> list[int]:
    return [pin.slot for pin in list_pins(open_store(uri))]


def wait_until(true: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.smoke
def test_commits_come_as_they_are_made_and_stay_while_they_are_used(uri: str) -> None:
    seen: list[int] = []
    with open_manager(uri, keep=1) as manager:
        manager.save(1, state_at(1), metrics={"loss": 0.25}).result()
        follower = stepkeeper.follow(uri, poll_s=0.02, timeout_s=60)
        with follower as commits:
            first = next(commits)
            assert (first.step, first.metrics) == (1, {"loss": 0.25})
            assert pinned(uri) == [first.sequence]
            for step in (2, 3):
                manager.save(step, state_at(step)).result()
            state = state_at(0)
            first.load(state)
            assert (state["model"]["w"][0].item(), state["position"]) == (1.0, 1), (
                "it was kept, deleted as it is"
            )
            for commit in commits:
                seen.append(commit.step)
                assert pinned(uri) == [commit.sequence]
                part = {"model": {"w": torch.zeros(8)}}
                commit.load(part, items=["model.w"])
                assert part["model"]["w"][0].item() == commit.step
                with pytest.raises(LoadMismatchError):
                    commit.load(part)
                if commit.step == 3:
                    threading.Timer(0.3, manager.save, (4, state_at(4))).start()
                else:
                    threading.Timer(0.1, follower.close).start()
        assert seen == [3, 4], "who is behind is told the newest"
        assert pinned(uri) == []
    kinds = [Log(open_store(uri)).entry(slot).kind for slot in range(Log(open_store(uri)).open().tail + 1)]
    assert kinds.count("begin") == 1
    assert "restored" not in kinds


def test_every_commit_comes_in_order_if_that_is_wanted(uri: str) -> None:
    with open_manager(uri) as manager:
        for step in (10, 20, 10):
            manager.save(step, state_at(step)).result()
    with stepkeeper.follow(uri, poll_s=0.01, timeout_s=0.0, every=True) as commits:
        found = list(commits)
    assert [commit.step for commit in found] == [10, 20, 10]
    with stepkeeper.follow(uri, poll_s=0.01, timeout_s=0.05, after=found[1].sequence) as commits:
        assert [commit.sequence for commit in commits] == [found[2].sequence]


def test_a_root_that_is_not_there_yet_is_waited_for(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with stepkeeper.follow(uri, poll_s=0.01, timeout_s=0.05) as commits:
        assert list(commits) == []
    assert caplog.messages == [f"{uri}: no commit here yet; waiting for the first one"]
    assert not Path(uri.removeprefix("file://")).exists()
    follower = stepkeeper.follow(uri, poll_s=0.01)
    steps: list[int] = []
    thread = threading.Thread(target=lambda: steps.extend(commit.step for commit in follower))
    thread.start()
    with open_manager(uri) as manager:
        manager.save(5, state_at(5)).result()
    wait_until(lambda: steps == [5])
    follower.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_store_that_gives_no_answer_is_asked_again(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepkeeper.errors import TransientStorageError

    with open_manager(uri) as manager:
        manager.save(1, state_at(1)).result()
    follower = stepkeeper.follow(uri, poll_s=0.01)
    opened = follower._log.open
    n_asked = 0

    def away() -> Any:
        nonlocal n_asked
        n_asked += 1
        if n_asked < 3:
            raise TransientStorageError(5, "no answer")
        return opened()

    monkeypatch.setattr(follower._log, "open", away)
    assert next(follower).step == 1
    assert n_asked == 3
    monkeypatch.setattr(follower._log, "refresh", lambda: (_ for _ in ()).throw(StorageError(13, "refused")))
    with pytest.raises(StorageError, match="refused"):
        next(follower)


READER: Final = Path(__file__).parent / "follow_reader" / "reader.py"


@pytest.fixture
def start_reader(torch_server: ForkServer, uri: str) -> Iterator[Callable[[str], ForkedProcess]]:
    """Start a reader of a root with one commit, and wait until it has read that."""
    readers: list[ForkedProcess] = []

    def start(mode: str) -> ForkedProcess:
        with open_manager(uri) as manager:
            manager.save(1, {"w": torch.ones(8)}).result()
        reader = torch_server.start([READER, uri, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        readers.append(reader)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "read 1\n"
        assert len(pinned(uri)) == 1
        return reader

    yield start
    for each in readers:
        each.kill()
        each.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("waits", -signal.SIGTERM, ""),
        ("computes_without_a_break", -signal.SIGTERM, ""),
        ("has_a_handler_that_closes", 0, "left the loop\n"),
    ],
)
def test_who_is_told_to_stop_takes_its_pin_along(
    start_reader: Callable[[str], ForkedProcess], uri: str, mode: str, code: int, said: str
) -> None:
    reader = start_reader(mode)
    reader.send_signal(signal.SIGTERM)
    assert reader.wait(LIMIT_S) == code
    assert reader.stdout is not None
    assert reader.stdout.read() == said
    assert pinned(uri) == []


def test_who_is_killed_holds_its_commit_for_a_lease_only(
    start_reader: Callable[[str], ForkedProcess], uri: str
) -> None:
    reader = start_reader("waits")
    reader.kill()
    reader.wait(LIMIT_S)
    root = Path(uri.removeprefix("file://"))
    (folder,) = (root / "1").iterdir()

    def start_and_save(step: int) -> None:
        with open_manager(uri, keep=4) as manager:
            manager.restore({"w": torch.zeros(8)})
            manager.save(step, {"w": torch.ones(8)}).result()

    for step in range(2, 7):
        start_and_save(step)
    assert Log(open_store(uri)).open().line[-1].step == 3
    assert (folder.exists(), len(pinned(uri))) == (True, 1), "many commits, but in no time"
    entries = sorted((root / ".stepkeeper" / "log").glob("*.json"))
    for number, entry in enumerate(entries):
        # As if the training had needed an hour for each.
        os.utime(entry, (time.time(), time.time() - 3600 * (len(entries) - number)))
    start_and_save(7)
    assert (folder.exists(), pinned(uri)) == (False, [])
