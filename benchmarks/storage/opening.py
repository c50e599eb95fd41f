"""The time to open a log that keeps very many commits: `python -m benchmarks.storage.opening`."""

import argparse
import os
import secrets
import tempfile
import time
from pathlib import Path

from stepkeeper.log import Log, ManifestRef
from stepkeeper.storage.open import open_store


def main() -> None:
    """Write logs of several lengths into a folder, and print what opening each of them takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    for n_commits in arguments.commits:
        with tempfile.TemporaryDirectory() as folder:
            size_bytes = _write(Path(folder), n_commits)
            store = open_store(f"file://{folder}")
            wall_s, cpu_s = zip(*(_open(Log(store), n_commits) for _ in range(arguments.runs)), strict=True)
            print(
                f"{n_commits:>7} commits, {size_bytes / n_commits:5.0f} bytes each: opened in {min(wall_s):.3f} s "
                f"(best of {arguments.runs}; worst {max(wall_s):.3f} s), CPU {min(cpu_s):.3f} s, load "
                f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            )


def _write(folder: Path, n_commits: int) -> int:
    """Write the log of a training that keeps every commit, and return its bytes."""
    log = Log(open_store(folder.as_uri()))
    claim = log.begin()
    for step in range(1, n_commits + 1):
        log.commit(
            claim,
            step=1000 * step,
            folder=f"{1000 * step}/0-{secrets.token_hex(16)}",
            size_bytes=36_061_162,
            manifest=ManifestRef(path="manifest.0.json", size_bytes=5096, crc32c=secrets.randbits(32)),
        )
    return sum(path.stat().st_size for path in folder.rglob("*.json"))


def _open(log: Log, n_commits: int) -> tuple[float, float]:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    state = log.open()
    took = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    assert len(state.commits) == n_commits, "the log was opened whole"
    return took


if __name__ == "__main__":
    main()
