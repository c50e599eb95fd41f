"""Two ranks on gloo, as processes: they save one checkpoint together, and agree on when."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper.checkpoint import read_manifests
from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.storage import open_store

RANK = Path(__file__).parent / "manager_trainer" / "rank.py"
N_RANKS = 2

Ranks = Callable[..., AbstractContextManager[list[ForkedProcess]]]
"""ranks(folder, n_steps, **options): the processes of all of them, as long as one is in it."""


@pytest.fixture
def ranks(torch_servers: tuple[ForkServer, ForkServer]) -> Ranks:
    @contextmanager
    def ranks(folder: Path, n_steps: int, **options: Any) -> Iterator[list[ForkedProcess]]:
        folder.mkdir(exist_ok=True)
        (folder / "port").unlink(missing_ok=True)
        uri = (folder / "root").as_uri()
        processes = [
            torch_servers[rank % 2].start(
                [RANK, uri, rank, N_RANKS, folder, n_steps, json.dumps(options)], stdout=subprocess.PIPE
            )
            for rank in range(N_RANKS)
        ]
        with ended_at_last(processes):
            yield processes

    return ranks


@pytest.mark.smoke
@pytest.mark.parametrize(("told", "collective"), [(1, False), (0, True)])
def test_one_notice_makes_all_ranks_save_one_step(
    tmp_path: Path, ranks: Ranks, told: int, collective: bool
) -> None:
    with ranks(tmp_path / "run", 100_000, interval=10**6, pause_s=0.004, collective=collective) as both:
        for process in both:
            hear(process, "step", at_least=20)
        both[told].send_signal(signal.SIGTERM)
        last = [hear_rest(process)[-1] for process in both]
        assert [process.returncode for process in both] == [ExitCode.SAVED] * N_RANKS
    assert last[0] == last[1] == {"event": "step", "step": last[0]["step"], "stop": True, "saved": False}

    store = open_store((tmp_path / "run" / "root").as_uri())
    head = Log(store).open().latest
    assert head is not None
    assert head.step == last[0]["step"]
    manifests = read_manifests(store, head)
    assert [[tensor.fqn for tensor in manifest.tensors] for manifest in manifests] == [["a"], ["b"]]

    with ranks(tmp_path / "run", head.step, interval=10**6) as both:
        starts = [hear(process, "start") for process in both]
        for process in both:
            hear_rest(process)
        assert [process.returncode for process in both] == [ExitCode.DONE] * N_RANKS
    step = head.step
    assert starts == [{"event": "start", "step": step, "a": step, "b": step, "value": step}] * N_RANKS


@pytest.mark.smoke
def test_a_rank_whose_collective_fails_because_another_was_killed_has_lost_a_peer(
    tmp_path: Path, ranks: Ranks
) -> None:
    """The collective may notice it first, and raises an error of its own."""
    with ranks(tmp_path / "run", 100_000, interval=10**6, collective=True) as (survivor, killed):
        for process in (survivor, killed):
            hear(process, "step", at_least=20)
        killed.send_signal(signal.SIGKILL)
        hear_rest(survivor)
        assert survivor.returncode == ExitCode.PEER_LOST


@pytest.mark.parametrize("options", [{}, {"asks": True}, {"asks": True, "preemption": False}])
def test_a_policy_by_the_clock_saves_the_same_steps_in_all_ranks(
    tmp_path: Path, ranks: Ranks, options: dict[str, Any]
) -> None:
    with ranks(tmp_path / "run", 300, seconds=0.4, pause_s=0.002, **options) as both:
        said = [hear_rest(process) for process in both]
        assert [process.returncode for process in both] == [ExitCode.DONE] * N_RANKS
    saved = [[each["step"] for each in one if each.get("saved")] for one in said]
    assert saved[0] == saved[1]
    assert saved[0]


def test_a_rank_that_cannot_write_voids_the_save_for_all(tmp_path: Path, ranks: Ranks) -> None:
    with ranks(tmp_path / "run", 100_000, interval=10, fail_at=20, pause_s=0.002) as both:
        for process in both:
            hear_rest(process)
        codes = {process.returncode for process in both}
    # Who comes to its next step after the other has ended has lost a peer.
    assert 1 in codes
    assert codes <= {1, ExitCode.PEER_LOST}
    log = Log(open_store((tmp_path / "run" / "root").as_uri()))
    steps = [record.step for record in log.open().line]
    # The save after it may begin, and succeed, before the failure comes out at a call; never the one that failed.
    assert 10 in steps
    assert 20 not in steps
