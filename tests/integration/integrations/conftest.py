"""Share processes that have imported the trainers."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from fork_server import TORCH, ForkServer

LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "torchdata", "torchtitan")


@pytest.fixture(scope="session")
def trainers_server() -> Iterator[ForkServer]:
    """Start one whose processes have the trainers. Tests that need it run on the newest torch only."""
    for name in LIBRARIES:
        pytest.importorskip(name, reason="`make test-newest` has the trainers, and runs this")
    modules = ("transformers.trainer", "peft", "lightning.pytorch", "torchdata.stateful_dataloader")
    with closing(ForkServer(*TORCH, *modules, env={"HF_HUB_OFFLINE": "1"})) as server:
        yield server
