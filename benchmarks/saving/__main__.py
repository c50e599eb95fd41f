"""Saving, ours and others', the same states in one run: a table of ratios, a picture, and a file of all figures."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.saving import notice, replicas
from benchmarks.saving import steps as training
from benchmarks.saving.lines import line
from benchmarks.saving.picture import draw
from benchmarks.saving.states import SHAPES

ROOT = Path(__file__).parents[2]
HOST_WAYS = (
    "warm memcpy",
    "dcp.save",
    "stepkeeper",
    "torch.save",
    "dcp.async_save, thread",
    "dcp.async_save, process",
    "dcp.save, ours in it",
    "dcp.async_save, ours in it",
)
DEVICE_WAYS = (
    "torch_xla's manager",
    "stepkeeper, 100 %",
    "stepkeeper, 50 %",
    "stepkeeper, 0 %",
    "torch_xla's, cores shared",
    "stepkeeper, cores shared",
)
"""The devices compute on one core, and all else runs on the other; or all on all cores."""

_DEVICES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "4",
    # Memory of "devices" is kept, as a device's own is: it isn't faulted in again for each copy.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**35),
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
}
_MANY_MIB = 500
_LARGE_MIB = 2000
"""From here on, fewer ways; and fewer saves and steps on devices."""


def main() -> None:
    """Measure, print, draw, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes-mib", type=_numbers, default=(100, 1000, 4000), help="4000 needs 20 GB of memory"
    )
    parser.add_argument("--saves", type=int, default=10, help="of the training on four devices")
    parser.add_argument("--every", type=int, default=20, help="steps from one of them to the next, or more")
    parser.add_argument(
        "--long-steps", type=int, default=1_200, help="of 100 ms, half of them beside saves; unpinned a fifth"
    )
    parser.add_argument("--short-steps", type=int, default=20_000, help="of 10 ms; the same")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "saving.json")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    machine = _machine()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in _cases(options.sizes_mib):
            found = _measured(case, folder, options)
            results.append(found)
            print(line(found, results), flush=True)
            # After each: a run that is ended early has measured all the same.
            document = {"machine": machine, "results": results}
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(results, options.out.with_suffix(".svg"))
    print(", ".join(f"{key}: {value}" for key, value in machine.items()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cases(sizes_mib: tuple[int, ...]) -> Iterator[tuple[str, str, str, int]]:
    """Yield the cases: place, way, shape and size in MiB.

    Cases that take more than ten minutes or add nothing new are left out: at 4,000 MiB the ways that take long for
    each tensor, and on devices all shapes but the first; there, 16,000 tensors make a step itself last seconds, and
    its compilation minutes.
    """
    for size_mib in sizes_mib:
        yield "disk", "the disk itself", "-", size_mib
        large = size_mib >= _LARGE_MIB
        for shape in SHAPES:
            for way in HOST_WAYS[:4] if large and shape != SHAPES[0] else HOST_WAYS:
                yield "host", way, shape, size_mib
            if (large and shape != SHAPES[0]) or (shape == "many small" and size_mib >= _MANY_MIB):
                continue
            for way in DEVICE_WAYS if shape == SHAPES[0] and not large else DEVICE_WAYS[:2]:
                yield "devices", way, shape, size_mib
    usual = [size_mib for size_mib in sizes_mib if size_mib < _LARGE_MIB]
    for way in training.WAYS:
        yield "steps", way, SHAPES[0], max(usual, default=min(sizes_mib))
    for way in replicas.WAYS:
        for shape in SHAPES[:2]:
            yield "replicas", way, shape, max(usual, default=min(sizes_mib))
    for way in notice.WAYS:
        yield "notice", way, SHAPES[0], min(sizes_mib)


def _measured(case: tuple[str, str, str, int], folder: str, options: argparse.Namespace) -> dict[str, Any]:
    where, way, shape, size_mib = case
    arguments = [*map(str, case), folder]
    if where == "devices":
        less = 4 if size_mib >= _LARGE_MIB else 1
        arguments += [str(max(3, options.saves // less)), str(options.every // less)]
    if where == "steps":
        n_steps = options.long_steps if way.endswith("100 ms") else options.short_steps
        arguments.append(str(n_steps // (1 if way.startswith("pinned") else 5)))
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


def _machine() -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "machine": platform.machine(),
        "processor": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """Return the processor's name, as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


if __name__ == "__main__":
    main()
