"""Loading from a cold disk: ours, `dcp.load` with our reader and without, the same state in one run."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks.loading.states import MIB, STATES

ROOT = Path(__file__).parents[2]
WORLDS = (1, 2)
PAUSE_S = 240


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--state", choices=STATES, nargs="*", default=STATES)
    parser.add_argument("--ranks", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "loading.json")
    options = parser.parse_args()
    facts = _machine()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for kind, world_size in product(options.state, options.ranks):
            folder = Path(name) / f"{kind}-{world_size}".replace(" ", "-")
            folder.mkdir()
            rows.append(_case(kind, world_size, options.mib, options.repeat, folder))
            _print(rows[-1])
    facts["load_1min_after"] = round(os.getloadavg()[0], 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": facts, "results": rows}, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))


def _case(kind: str, world_size: int, mib: int, repeat: int, folder: Path) -> dict[str, Any]:
    """Measure all ways by turns, so that other load hits all of them."""
    _run("save", world_size, kind, mib, folder)
    found: dict[str, list[list[dict[str, Any]]]] = {"ours": [], "reader": [], "dcp": []}
    disk = []
    for _ in range(repeat):
        for what, runs in found.items():
            _make_cold(folder)
            runs.append(_run(what, world_size, kind, mib, folder))
        _make_cold(folder)
        disk.append(_run_disk(folder / "ours"))
    seconds = {what: [max(rank["took_s"] for rank in run) for run in runs] for what, runs in found.items()}
    return {
        "state": kind,
        "world_size": world_size,
        "mib": mib,
        "ours_s": statistics.median(seconds["ours"]),
        "reader_s": statistics.median(seconds["reader"]),
        "dcp_s": statistics.median(seconds["dcp"]),
        "ratio": round(statistics.median(seconds["dcp"]) / statistics.median(seconds["ours"]), 2),
        "ours_read": _read_share(found["ours"], mib),
        "reader_read": _read_share(found["reader"], mib),
        "dcp_read": _read_share(found["dcp"], mib),
        "ours_cpu_s": statistics.median(sum(rank["cpu_s"] for rank in run) for run in found["ours"]),
        "reader_cpu_s": statistics.median(sum(rank["cpu_s"] for rank in run) for run in found["reader"]),
        "dcp_cpu_s": statistics.median(sum(rank["cpu_s"] for rank in run) for run in found["dcp"]),
        "disk_mib_s": round(mib / statistics.median(disk)),
        "all_ours_s": seconds["ours"],
        "all_reader_s": seconds["reader"],
        "all_dcp_s": seconds["dcp"],
    }


def _read_share(runs: Sequence[Sequence[dict[str, Any]]], mib: int) -> float:
    """Divide the bytes that all ranks read together by those of the state."""
    read: float = statistics.median(sum(rank["read_bytes"] for rank in run) for run in runs)
    return round(read / (mib * MIB), 4)


def _run(what: str, world_size: int, kind: str, mib: int, folder: Path) -> list[dict[str, Any]]:
    (folder / "ranks").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.loading.measure", what]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), kind, str(mib), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=PAUSE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(err[-2000:] for _, err in said))
    return [
        json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        for out, _ in said
        if what != "save"
    ]


def _run_disk(folder: Path) -> float:
    """Seconds for one program to read the files from end to end, as the disk's own limit."""
    script = (
        "import sys,time,pathlib;b=time.perf_counter();buf=bytearray(1<<22)\n"
        "for p in sorted(pathlib.Path(sys.argv[1]).rglob('*.distcp')):\n"
        "  f=p.open('rb',buffering=0)\n"
        "  while f.readinto(buf): pass\n"
        "print(time.perf_counter()-b)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def _make_cold(folder: Path) -> None:
    """Remove these files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['state']:>10}, {row['world_size']} rank(s), {row['mib']} MiB: ours {row['ours_s']:.2f} s "
        f"(CPU {row['ours_cpu_s']:.2f}), dcp.load with our reader {row['reader_s']:.2f} s (CPU "
        f"{row['reader_cpu_s']:.2f}), dcp.load {row['dcp_s']:.2f} s (CPU {row['dcp_cpu_s']:.2f}), "
        f"{row['ratio']:.2f}x; read {row['ours_read']:.3f}, {row['reader_read']:.3f} and {row['dcp_read']:.3f} of the "
        f"state; the disk alone {row['disk_mib_s']} MiB/s",
        flush=True,
    )


def _machine() -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min_before": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
