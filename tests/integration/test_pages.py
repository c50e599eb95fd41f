"""All Python blocks of the pages run, and the commands of those that ask no cluster, in their order."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from page_blocks import Block, asks_cluster, page_names, read_blocks
from page_marks import STORIES
from page_reader import Reader, reading
from page_worlds import BUCKETS, CHECKS, OWN_NETWORK, WORLDS

from stepcluster import binaries
from stepkeeper_testing.gcs import fake_gcs_server

# The page of the DDP example starts ten processes that import torch.
pytestmark = pytest.mark.timeout(900)


def runs_here(block: Block) -> bool:
    """Tell whether the block runs in this test: tests/e2e/test_pages.py has the commands for a cluster."""
    if block.mark or block.file:
        return False
    return block.language == "python" or (block.is_shell and not asks_cluster(block.page))


PAGES = [
    page
    for page in page_names()
    if page not in STORIES and any(runs_here(block) for block in read_blocks(page))
]


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[str]:
    """The address of a storage with the buckets of the pages."""
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], tmp_path) as address:
        for name in BUCKETS:
            request = urllib.request.Request(
                f"{address}/storage/v1/b?project=test",
                data=json.dumps({"name": name}).encode(),
                headers={"Content-Type": "application/json"},
            )
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).close()
        yield address


@pytest.fixture
def reader(gcs: str, page: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs)
    with reading(own_network=page in OWN_NETWORK) as reader:
        yield reader


@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_says(page: str, reader: Reader) -> None:
    if page in WORLDS:
        WORLDS[page](reader)
    blocks = read_blocks(page)
    reader.opens(blocks)
    for block in blocks:
        if runs_here(block):
            reader.does(block)
    if any(block.language == "python" and not block.file for block in blocks):
        reader.leaves_python()
    if page in CHECKS:
        CHECKS[page](reader)


RUN = """
import random, sys
import torch
from stepkeeper import CheckpointManager

seed, stop_after = int(sys.argv[1]), int(sys.argv[2])
random.seed(seed)
torch.manual_seed(seed)
given = CheckpointManager.step


def step(manager, number, *arguments):
    outcome = given(manager, number, *arguments)
    if number == stop_after:
        raise SystemExit(3)
    return outcome


CheckpointManager.step = step
exec(compile(open(sys.argv[3], encoding="utf-8").read(), sys.argv[3], "exec"), {"__name__": "page"})
"""
"""Run the script, and end the process, as by an error, after a step."""

Run = Callable[..., list[list[str]]]
"""run(folder, seed, stop_after=None): what was printed, in words."""


@pytest.fixture
def run(torch_server: ForkServer, tmp_path: Path) -> Run:
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    script, *_ = (block for block in read_blocks("docs/user/state.md") if block.language == "python")
    (tmp_path / "script.py").write_text(script.text, encoding="utf-8")

    def run(folder: str, seed: int, *, stop_after: int = -1) -> list[list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [tmp_path / "run.py", seed, stop_after, tmp_path / "script.py"]
        done = torch_server.run(command, cwd=tmp_path / folder, timeout=200)
        assert done.returncode == (0 if stop_after < 0 else 3), done.stderr[-4000:]
        return [line.split() for line in done.stdout.splitlines()]

    return run


@pytest.mark.smoke
def test_it_resumes_bit_for_bit(run: Run) -> None:
    undisturbed = run("undisturbed", 0)
    assert [int(step) for step, _ in undisturbed] == list(range(1, 21))
    assert run("stopped", 0, stop_after=8) == undisturbed[:8]
    # A new process has other random numbers.
    assert run("stopped", 1, stop_after=12) == undisturbed[5:12]
    assert run("stopped", 2) == undisturbed[10:]
