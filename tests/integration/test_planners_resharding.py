"""Saved by one to four ranks, loaded by one to four: every pair, ours and torch's planners on either side."""

import time
from pathlib import Path

from fork_server import ForkServer

RESHARDING = Path(__file__).parent / "planners_gloo" / "resharding.py"


def test_all_pairs_of_world_sizes(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> None:
    logs = [tmp_path / f"stderr-{rank}" for rank in range(4)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as stderr:
            ranks.append(torch_servers[rank % 2].start([RESHARDING, rank, tmp_path], stderr=stderr))
    try:
        # Where one fails the others wait for it.
        deadline = time.monotonic() + 240
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert codes == [0] * 4, "\n".join(log.read_text()[-3000:] for log in logs)
