"""Ranks on gloo, as processes: they save one checkpoint together, agree on when, and end together."""

import json
import signal
import subprocess
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.trainer import open_manager

RANKS = Path(__file__).parent / "manager_trainer" / "ranks.py"

Ranks = Callable[..., AbstractContextManager[list[ForkedProcess]]]
"""ranks(case, n=2, **options): the processes of all of them, as long as one is in it."""


@pytest.fixture
def ranks(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Ranks:
    @contextmanager
    def ranks(case: str, n: int = 2, **options: Any) -> Iterator[list[ForkedProcess]]:
        processes = [
            torch_servers[rank % 2].start(
                [RANKS, rank, n, tmp_path, case, json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(n)
        ]
        with ended_at_last(processes):
            yield processes

    return ranks


def log_of(folder: Path) -> Log:
    return Log(open_store((folder / "root").as_uri()))


@pytest.mark.smoke
@pytest.mark.parametrize(("told", "collective"), [(1, False), (0, True)])
def test_one_notice_makes_all_ranks_save_one_step(
    tmp_path: Path, ranks: Ranks, told: int, collective: bool
) -> None:
    with ranks("train", steps=100_000, interval=10**6, pause_s=0.004, collective=collective) as both:
        for process in both:
            hear(process, "step", at_least=20)
        both[told].send_signal(signal.SIGTERM)
        last = [hear_rest(process)[-1] for process in both]
        assert [process.returncode for process in both] == [ExitCode.SAVED] * 2
    step = last[0]["step"]
    assert last == [{"event": "step", "step": step, "stop": True, "saved": False}] * 2
    log = log_of(tmp_path)
    head = log.open().latest
    assert head is not None
    assert head.step == step
    manifests = read_manifests(open_store((tmp_path / "root").as_uri()), head)
    assert [[tensor.fqn for tensor in manifest.tensors] for manifest in manifests] == [["a"], ["b"]]
    with ranks("train", steps=step, interval=10**6) as both:
        starts = [hear(process, "start") for process in both]
        for process in both:
            hear_rest(process)
        assert [process.returncode for process in both] == [ExitCode.DONE] * 2
    assert starts == [{"event": "start", "step": step, "a": step, "b": step, "value": step}] * 2


@pytest.mark.smoke
def test_a_rank_whose_collective_fails_because_another_was_killed_has_lost_a_peer(ranks: Ranks) -> None:
    """The collective may notice it first, and raises an error of its own."""
    with ranks("train", steps=100_000, interval=10**6, collective=True) as (survivor, killed):
        for process in (survivor, killed):
            hear(process, "step", at_least=20)
        killed.send_signal(signal.SIGKILL)
        hear_rest(survivor)
        assert survivor.returncode == ExitCode.PEER_LOST


def test_a_policy_by_the_clock_saves_the_same_steps_in_all_ranks(ranks: Ranks) -> None:
    with ranks("train", steps=300, seconds=0.4, pause_s=0.002) as both:
        said = [hear_rest(process) for process in both]
        assert [process.returncode for process in both] == [ExitCode.DONE] * 2
    saved = [[each["step"] for each in one if each.get("saved")] for one in said]
    assert saved[0] == saved[1]
    assert saved[0]


def test_a_rank_that_cannot_write_voids_the_save_for_all(tmp_path: Path, ranks: Ranks) -> None:
    with ranks("train", steps=100_000, interval=10, fail_at=20, pause_s=0.002) as both:
        for process in both:
            hear_rest(process)
        codes = {process.returncode for process in both}
    # Who comes to its next step after the other has ended has lost a peer.
    assert 1 in codes
    assert codes <= {1, ExitCode.PEER_LOST}
    steps = [record.step for record in log_of(tmp_path).open().line]
    # The save after it may begin, and succeed, before the failure comes out at a call; never the one that failed.
    assert 10 in steps
    assert 20 not in steps


def test_a_save_that_fails_on_one_rank_is_tolerated_on_both(tmp_path: Path, ranks: Ranks) -> None:
    with ranks("train", steps=35, interval=10, refused_at=20, tolerated=1, pause_s=0.01) as both:
        said = [process.communicate(timeout=150)[0] for process in both]
        assert [process.wait() for process in both] == [ExitCode.DONE] * 2, said
    for text in said:
        warning = "failed save 1 of 1 in a row that training continues after: "
        warned = [line for line in text.splitlines() if warning in line]
        assert [line.endswith("the quota is used up") for line in warned] == [True], text
    # The last step is saved at the end.
    assert [record.step for record in log_of(tmp_path).open().line] == [35, 30, 10]


def run_to_the_end(ranks: Ranks, folder: Path, how: str) -> tuple[list[int], list[str], list[int]]:
    """Return the exit codes of three ranks whose training ends, what each wrote, and the steps that are saved."""
    with ranks("end", 3, how=how) as processes:
        said = [process.communicate(timeout=150)[0] for process in processes]
        codes = [process.wait() for process in processes]
    with open_manager(folder / "root", 10**6) as manager:
        return codes, said, manager.steps()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("how", "code"),
    [
        *((how, ExitCode.DONE) for how in ("plain", "total", "notice")),
        # One rank has heard of the notice, and the programs of all end themselves for it.
        ("told", ExitCode.SAVED),
    ],
)
def test_all_ranks_save_the_last_step(ranks: Ranks, tmp_path: Path, how: str, code: ExitCode) -> None:
    codes, said, saved = run_to_the_end(ranks, tmp_path, how)
    assert (codes, saved) == ([code] * 3, [5, 7]), said
    state: dict[str, Any] = {"w": torch.zeros(100), "step": 0}
    with open_manager(tmp_path / "root", 10**6) as manager:
        manager.restore(state, 7)
    assert (state["step"], state["w"].tolist()) == (7, [7.0] * 100)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("uneven", "the ranks end at different steps (unsaved: 6, 7)"),
        ("changed", "step 7, the last one, is not saved: the state has changed since"),
    ],
)
def test_no_rank_saves_what_one_rank_has_not(ranks: Ranks, tmp_path: Path, how: str, told: str) -> None:
    codes, said, saved = run_to_the_end(ranks, tmp_path, how)
    assert (codes, saved) == ([ExitCode.DONE] * 3, [5]), said
    assert [told in each for each in said] == [True, False, False]


TRAINERS = Path(__file__).parent / "manager_trainer"
STATES = TRAINERS / "states.py"


def loaders(folder: Path, step: int, world_size: int) -> list[list[int]]:
    return [literal_eval((folder / f"at-{step}-{r}-of-{world_size}").read_text()) for r in range(world_size)]


@pytest.mark.timeout(900)
def test_each_rank_gets_its_own_back_and_another_world_size_its_part(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(STATES, 1, tmp_path, "train")
    launch(STATES, 2, tmp_path, "train")
    launch(STATES, 2, tmp_path, "train")
    launch(STATES, 1, tmp_path, "refused")
    launch(STATES, 1, tmp_path, "train")
    assert loaders(tmp_path, 0, 1) == [list(range(12))]
    assert loaders(tmp_path, 2, 2) == [[2, 4, 6, 8, 10], [3, 5, 7, 9, 11]]
    assert loaders(tmp_path, 4, 2) == [[6, 8, 10], [7, 9, 11]]
    assert loaders(tmp_path, 6, 1) == [[10, 11]]


@pytest.mark.smoke
def test_states_that_differ_are_refused_in_all_ranks_before_anything_is_written(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(STATES, 2, tmp_path, "differs")


@pytest.mark.timeout(600)
def test_each_rank_goes_on_with_its_own_and_a_further_one_with_what_all_had_alike(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    def drawn(first: int, last: int, world_size: int) -> list[list[tuple[float, float]]]:
        launch(TRAINERS / "random_ranks.py", world_size, tmp_path, first, last)
        paths = (tmp_path / f"{first}-{last}-{rank}-of-{world_size}" for rank in range(world_size))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    whole = drawn(1, 9, 2)
    assert whole[0] != whole[1]
    # The newest commit is of step 9; the one before is gone back to.
    again = drawn(9, 10, 2)
    assert [each[0] for each in again] == [each[8] for each in whole]
    more = drawn(11, 11, 3)
    assert len({python for ((python, _),) in more}) == 3, "each has data of its own"
    assert len({torch for ((_, torch),) in more}) == 1, "all drop out the same"
