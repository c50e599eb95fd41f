"""Ranks that restore together: if one of them can't, none is changed, and all say why."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer

SHARING = Path(__file__).parent / "manager_trainer" / "sharing.py"
RESTORING = Path(__file__).parent / "manager_trainer" / "restoring.py"
TWO_NODES = Path(__file__).parent / "manager_trainer" / "two_nodes.py"


@pytest.mark.smoke
def test_all_ranks_or_none(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(RESTORING, 2, tmp_path, "one_does_not_fit")


def test_what_is_saved_after_going_back_descends_from_what_was_restored(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RESTORING, 2, tmp_path, "going_back")


def test_what_one_node_reads_bad_another_reads_again(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(TWO_NODES, 2, tmp_path)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("replicated", 2),
        ("one_reads_badly", 2),
        ("hybrid", 4),
        pytest.param("replicated", 4, marks=pytest.mark.long),
    ],
)
def test_what_several_ranks_need_one_reads_for_all(
    launch: Callable[..., None], tmp_path: Path, scenario: str, world_size: int
) -> None:
    launch(SHARING, world_size, tmp_path, scenario)


def test_a_rank_that_is_killed_in_a_restore_is_named_by_the_others(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path
) -> None:
    ranks = [
        server.start([SHARING, rank, 2, tmp_path, "one_is_killed"])
        for rank, server in enumerate(torch_servers)
    ]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
