"""Planning by number of chunks, ours and torch's, on one machine in one run; the table and a file of results."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
PLANNERS = (
    "ours, one rank",
    "ours, coordinator",
    "torch's DefaultSavePlanner, coordinator",
)
STATES = ("sharded", "hybrid", "replicated", "spiral")
LIMIT_S, LIMIT_BYTES = 5.0, 10**9
"""Limits for our planner at the largest size, in each process."""


def main() -> int:
    """Measure, print, and write the results. 0: ours keep within their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="for each process; larger sizes are left out then"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planning.json")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for state, planner in product(STATES, PLANNERS):
        rows = list(_grow(planner, state, options.ranks, options.limit_s))
        results += rows
        _print_case(planner, state, rows)
    facts = _machine()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"machine": facts, "results": results}, indent=1) + "\n", encoding="utf-8"
    )
    _print_all_ranks(results, options.ranks)
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    beyond = beyond_limits(results)
    for row in beyond:
        print(f"BEYOND {LIMIT_S:.0f} s or {LIMIT_BYTES / 1e9:.0f} GB: {row}")
    return 1 if beyond else 0


def beyond_limits(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ours, of the largest size, that took too long or too much memory."""
    # A state of whole tensors has a few chunks less than were asked for.
    largest = SIZES[-1] * 0.98
    ours = (row for row in results if row["planner"].startswith("ours") and row["n_chunks"] >= largest)
    return [
        row
        for row in ours
        if "plan_s" not in row or row["plan_s"] >= LIMIT_S or row["peak_bytes"] >= LIMIT_BYTES
    ]


def _grow(planner: str, state: str, world_size: int, limit_s: float) -> list[dict[str, Any]]:
    """Measure one row for each size, up to the first that takes too long."""
    rows = []
    for n_chunks in SIZES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.planning.measure",
            planner,
            state,
            str(n_chunks),
            str(world_size),
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            rows.append({"planner": planner, "state": state, "n_chunks": n_chunks, "over_s": limit_s})
            break
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> float | None:
    """Fit the exponent to all but the smallest size: 1 where twice as many chunks take twice as long."""
    points = [(math.log(row["n_chunks"]), math.log(row["plan_s"])) for row in rows[1:] if "plan_s" in row]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    return slope


def _print_case(planner: str, state: str, rows: Sequence[dict[str, Any]]) -> None:
    exponent = growth(rows)
    print(f"\n{planner}, {state} state" + (f": time grows with chunks^{exponent:.2f}" if exponent else ""))
    print(f"{'chunks':>10} {'pieces':>10} {'CPU':>10} {'wall':>10} {'peak memory':>14} {'of it before':>14}")
    for row in rows:
        if "plan_s" in row:
            memory = [f"{row[key] / 1e6:.0f} MB" for key in ("peak_bytes", "peak_before_bytes")]
            cells = (
                row["n_chunks"],
                row["n_pieces"],
                f"{row['plan_s']:.2f} s",
                f"{row['plan_wall_s']:.2f} s",
            )
            print("".join(f"{cell:>10} " for cell in cells) + "".join(f"{cell:>14} " for cell in memory))
        else:
            print(f"{row['n_chunks']:>10} over {row['over_s']:.0f} s, making the state included")
    sys.stdout.flush()


def _print_all_ranks(results: Sequence[dict[str, Any]], world_size: int) -> None:
    """Print what all ranks take together when they plan at the same time."""
    for state in STATES:
        rows = [
            r for r in results if (r["planner"], r["state"]) == ("ours, one rank", state) and "plan_s" in r
        ]
        if rows:
            print(
                f"\nours, all {world_size} ranks together, {state} state of {rows[-1]['n_chunks']} chunks: "
                f"{rows[-1]['plan_s'] * world_size:.0f} CPU seconds, on as many processes at once"
            )


def _machine() -> dict[str, Any]:
    load = os.getloadavg()[0]
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min": round(load, 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "took_s": round(time.process_time() + sum(os.times()[2:4]), 0),
    }


if __name__ == "__main__":
    sys.exit(main())
