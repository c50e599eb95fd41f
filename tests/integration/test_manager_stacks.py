"""Stacks of all threads of all ranks, as processes: asked for by the operator, or because a step takes too long."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear
from report_endpoint import Operator, make_certificate

from stepkeeper.contract import Directive, Endpoint, Interval, Report, Settings
from stepkeeper.stacks.dumping import REPORT_LIMIT

TRAINER = Path(__file__).parent / "manager_trainer" / "stacks.py"
HELD = "stand_still_with_the_lock"
FREE = "stand_still_without_the_lock"
FOR_EVER_S = 600

Ranks = Callable[..., AbstractContextManager[list[ForkedProcess]]]


@pytest.fixture
def ranks(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Ranks:
    @contextmanager
    def ranks(world_size: int, **options: Any) -> Iterator[list[ForkedProcess]]:
        processes = []
        for rank in range(world_size):
            with (tmp_path / f"log.{rank}").open("w") as log:
                processes.append(
                    torch_servers[rank % 2].start(
                        [TRAINER, tmp_path, rank, world_size, json.dumps(options)],
                        stdout=subprocess.PIPE,
                        stderr=log,
                    )
                )
        with ended_at_last(processes):
            yield processes

    return ranks


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    pod = tmp_path / "pod"
    pod.mkdir()
    make_certificate(pod)
    (pod / "token").write_text("the-token\n")
    server = Operator(pod)
    server.answer = lambda _: Directive(report_interval_s=1)
    settings = Settings(
        uri=(tmp_path / "root").as_uri(),
        interval=Interval(steps=1000),
        endpoint=Endpoint(url=server.url, report_interval_s=1),
    )
    (pod / "settings.json").write_bytes(settings.to_json())
    yield server
    server.close()


def wait_for_log(folder: Path, rank: int, wanted: Callable[[str], bool], timeout_s: float = 90.0) -> str:
    ends_s = time.monotonic() + timeout_s
    while not wanted(log := (folder / f"log.{rank}").read_text()):
        assert time.monotonic() < ends_s, log
        time.sleep(0.05)
    return log


@pytest.mark.parametrize("holds", [0, 1, pytest.param(None, marks=pytest.mark.long)])
def test_a_directive_has_the_stacks_of_all_ranks_logged_and_reported(
    tmp_path: Path, operator: Operator, ranks: Ranks, holds: int | None
) -> None:
    with ranks(2, holds=holds, seconds=FOR_EVER_S) as both:
        for process in both:
            hear(process, "stands")
        operator.answer = lambda report: Directive(dump_stacks=report.stacks is None, report_interval_s=1)
        report: Report = operator.wait_for(lambda report: report.stacks is not None)
        operator.answer = lambda _: Directive(report_interval_s=1)
        expected = [HELD if rank == holds else FREE for rank in range(2)]
        for rank, function in enumerate(expected):
            log = wait_for_log(tmp_path, rank, lambda log, function=function: function in log)  # type: ignore[misc]
            assert "because the operator asks for them" in log
    assert report.stacks is not None
    first, _, second = report.stacks.partition("rank 1:\n")
    assert (expected[0] in first, expected[1] in second) == (True, True), report.stacks


WHERE = [(2, 0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 0), (2, 1), (1, None)))]


@pytest.mark.parametrize(("world_size", "holds"), WHERE)
def test_a_step_that_takes_far_longer_has_the_stacks_of_all_ranks_logged(
    tmp_path: Path, ranks: Ranks, world_size: int, holds: int | None
) -> None:
    with ranks(world_size, holds=holds, seconds=FOR_EVER_S, after_s=1.0) as processes:
        for process in processes:
            hear(process, "stands")
        for rank in range(world_size):
            function = HELD if rank == holds else FREE
            wait_for_log(tmp_path, rank, lambda log, function=function: function in log)  # type: ignore[misc]
    assert any(
        "nothing has followed step" in (tmp_path / f"log.{rank}").read_text() for rank in range(world_size)
    )


def test_a_step_that_takes_far_longer_has_as_much_of_the_stacks_reported_as_a_report_takes(
    tmp_path: Path, operator: Operator, ranks: Ranks
) -> None:
    with ranks(2, holds=1, seconds=FOR_EVER_S, after_s=1.0, in_pod=True, more_threads=30) as both:
        for process in both:
            hear(process, "stands")
        report = operator.wait_for(lambda report: HELD in (report.stacks or ""))
        logs = [wait_for_log(tmp_path, rank, lambda log: "in main" in log) for rank in range(2)]
    stacks = report.stacks
    assert stacks is not None
    assert "nothing has followed step" in stacks.splitlines()[0]
    first, _, second = stacks.partition("rank 1:\n")
    assert (FREE in first, HELD in second) == (True, True), stacks
    # The logs have all of them, which no report would be taken with.
    assert len(stacks) <= REPORT_LIMIT
    assert all(log.count("in stand_by") > stacks.count("in stand_by") for log in logs)
    assert min(map(len, logs)) > REPORT_LIMIT
