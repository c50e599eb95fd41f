"""All Python blocks of the pages run, and the commands of those that ask no cluster: as they stand, in their order."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
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
