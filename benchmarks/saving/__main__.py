"""Saving, ours and others', the same states in one run: a table of ratios, a picture, and a file of all figures."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.saving.picture import draw
from benchmarks.saving.states import SHAPES

ROOT = Path(__file__).parents[2]
HOST_WAYS = (
    "warm memcpy",
    "stepkeeper",
    "torch.save",
    "dcp.save",
    "dcp.async_save, thread",
    "dcp.async_save, process",
)
DEVICE_WAYS = ("stepkeeper, 100 %", "stepkeeper, 50 %", "stepkeeper, 0 %", "torch_xla's manager")
_DEVICES = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def main() -> None:
    """Measure, print, draw, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mib", type=_numbers, default=(100, 1000), help="4000 needs 20 GB of memory")
    parser.add_argument("--steps", type=int, default=200, help="of the training on four devices")
    parser.add_argument("--saves", type=int, default=10, help="in these steps")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for each measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "saving.json")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in _cases(options.sizes_mib):
            found = _measured(case, folder, options)
            results.append(found)
            print(_line(found, results), flush=True)
    document: dict[str, Any] = {"machine": _machine(), "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(results, options.out.with_suffix(".svg"))
    print(", ".join(f"{key}: {value}" for key, value in document["machine"].items()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cases(sizes_mib: tuple[int, ...]) -> Iterator[tuple[str, str, str, int]]:
    """Where, which way, of which shape and size. Small states have one shape only."""
    for size_mib in sizes_mib:
        yield "disk", "the disk itself", "-", size_mib
        for shape in SHAPES if size_mib == max(sizes_mib) else SHAPES[:1]:
            for way in HOST_WAYS:
                yield "host", way, shape, size_mib
            for way in DEVICE_WAYS:
                yield "devices", way, shape, size_mib


def _measured(case: tuple[str, str, str, int], folder: str, options: argparse.Namespace) -> dict[str, Any]:
    where, way, shape, size_mib = case
    arguments = [*map(str, case), folder]
    if where == "devices":
        arguments += [str(options.steps), str(options.steps // options.saves)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.saving.measure", *arguments],
            cwd=ROOT,
            env={**os.environ, **(_DEVICES if where == "devices" else {})},
            capture_output=True,
            text=True,
            check=True,
            timeout=options.limit_s,
        )
    except subprocess.TimeoutExpired:
        failure = f"over {options.limit_s:.0f} s"
    except subprocess.CalledProcessError as error:
        failure = (error.stderr.strip().splitlines() or ["?"])[-1][:160]
    else:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    return {"where": where, "way": way, "shape": shape, "size_mib": size_mib, "failure": failure}


def _line(found: dict[str, Any], results: list[dict[str, Any]]) -> str:
    head = f"{found['where']:8}{found['size_mib']:6} MiB  {found['shape']:12} {found['way']:26}"
    if "failure" in found:
        return f"{head} {found['failure']}"
    gib = found["size_mib"] / 1024
    if found["where"] == "disk":
        return head + ("" if found["best_s"] is None else f" {gib / found['best_s']:6.2f} GiB/s")
    memory = (found["peak_extra_bytes"] + found.get("others_bytes", 0)) / (found["size_mib"] * 1024 * 1024)
    if found["where"] == "host":
        stall_s, durable_s = (statistics.median(found[key][1:]) for key in ("stall_s", "durable_s"))
        least = _same(results, found, "warm memcpy")
        ratio = "" if least is None else f" = {stall_s / statistics.median(least['stall_s'][1:]):5.2f} memcpy"
        text = f" stall {stall_s * 1000:7.0f} ms{ratio}, durable at {gib / durable_s:5.2f} GiB/s"
        return f"{head}{text}, first stall {found['stall_s'][0] * 1000:6.0f} ms, memory {memory:4.2f}x"
    per_gib_ms = found["wall_per_save_s"] / gib * 1000
    copies = found["wall_per_save_s"] / found["device_copy_s"]
    steps = ""
    if found["step_beside_s"] and found["step_alone_s"]:
        steps = (
            f", steps {found['step_alone_s'] * 1000:.0f} ms alone, {found['step_beside_s'] * 1000:.0f} ms beside a "
            f"save, {found['worst_step_beside_s'] * 1000:.0f} ms at most"
        )
    stall_ms = statistics.median(found["stall_s"]) * 1000
    text = (
        f" call {stall_ms:6.0f} ms, wall {per_gib_ms:6.0f} ms/GiB for each save = {copies:5.1f} device copies"
    )
    return f"{head}{text}{steps}, memory {memory:4.2f}x"


def _same(results: list[dict[str, Any]], found: dict[str, Any], way: str) -> dict[str, Any] | None:
    wanted = (found["where"], way, found["shape"], found["size_mib"])
    for other in results:
        known = (other["where"], other["way"], other["shape"], other["size_mib"])
        if known == wanted and "failure" not in other:
            return other
    return None


def _machine() -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
