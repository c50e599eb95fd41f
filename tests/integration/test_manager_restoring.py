"""Ranks that restore together: if one of them can't, none is changed, and all say why."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from rank_talk import ended_at_last

RESTORING = Path(__file__).parent / "manager_trainer" / "restoring.py"


@pytest.mark.smoke
def test_all_ranks_or_none(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(RESTORING, 2, tmp_path, "one_does_not_fit")


def test_what_is_saved_after_going_back_descends_from_what_was_restored(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RESTORING, 2, tmp_path, "going_back")


@pytest.mark.parametrize(("scenario", "world_size"), [("one_reads_badly", 2), ("read_together", 4)])
def test_what_several_ranks_need_one_reads_for_all(
    launch: Callable[..., None], tmp_path: Path, scenario: str, world_size: int
) -> None:
    launch(RESTORING, world_size, tmp_path, scenario)


def test_a_rank_that_is_killed_in_a_restore_is_named_by_the_others(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path
) -> None:
    ranks = [
        server.start([RESTORING, rank, 2, tmp_path, "one_is_killed"])
        for rank, server in enumerate(torch_servers)
    ]
    with ended_at_last(ranks):
        assert [rank.wait(200) for rank in ranks] == [0, -signal.SIGKILL]
