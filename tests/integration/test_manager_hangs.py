"""Trainings of two ranks, one of which hangs: the reports name the hang, the rank and what it does, until it moves."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear
from report_endpoint import Operator

from stepkeeper.contract import Directive, Endpoint, EveryInterval, HangLimits, Interval, Settings

TRAINER = Path(__file__).parent / "manager_trainer" / "hangs.py"


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    (tmp_path / "token").write_text("the-token\n")
    server = Operator(tmp_path)
    server.answer = lambda _: Directive(report_interval_s=1)
    settings = Settings(
        uri=(tmp_path / "root").as_uri(),
        interval=Interval(every=EveryInterval(steps=10_000)),
        endpoint=Endpoint(url=server.url, report_interval_s=1),
        hang=HangLimits(startup_s=600, after_s=2),
    )
    (tmp_path / "settings.json").write_bytes(settings.to_json())
    yield server
    server.close()


@pytest.fixture
def train(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path
) -> Iterator[Callable[[str, int], None]]:
    """train(fault, rank): two ranks train until this rank hangs."""
    processes: list[ForkedProcess] = []

    def train(fault: str, hung: int) -> None:
        for rank, server in enumerate(torch_servers):
            with (tmp_path / f"log.{rank}").open("w") as log:
                processes.append(
                    server.start([TRAINER, tmp_path, rank, fault, hung], stdout=subprocess.PIPE, stderr=log)
                )
        hear(processes[hung], "hangs")

    with ended_at_last(processes):
        yield train


@pytest.mark.parametrize(
    ("fault", "hung", "kind", "text"),
    [
        ("loop", 1, "NotInCollective", "rank 1 is running Python code at"),
        pytest.param("data", 1, "DataLoader", "rank 1 is waiting for data at", marks=pytest.mark.long),
        ("lock", 0, "GilHeld", "rank 0 is in C code that holds Python's lock at"),
        ("stop", 1, "Stopped", "rank 1 is stopped by a signal (SIGSTOP) or a debugger"),
    ],
)
def test_a_hang_is_reported_with_the_rank_that_the_others_wait_for(
    tmp_path: Path,
    operator: Operator,
    train: Callable[[str, int], None],
    fault: str,
    hung: int,
    kind: str,
    text: str,
) -> None:
    train(fault, hung)
    report = operator.wait_for(lambda report: report.hang is not None)
    hang = report.hang
    assert hang is not None
    other = 1 - hung
    assert (hang.kind, hang.ranks) == (kind, (hung,)), hang.text
    assert hang.text.startswith(text)
    assert f"rank {other} is waiting in a collective, or for its device at" in hang.text
    assert "in main" in hang.text
    assert f"rank {other}:\n" in hang.stacks
    assert report.stacks is None
    assert abs(time.time() - hang.since_unix_s) < 600
    assert len(json.dumps(hang.stacks)) < 40_000
    assert "the training hangs" in (tmp_path / "log.0").read_text()
    if fault == "loop":
        (tmp_path / "go").touch()
        moved = operator.wait_for(lambda report: (report.step or 0) > 10)
        assert moved.hang is None
