"""Measure the operator at 100 to 3,000 jobs of 16 pods, on a real API server: `python -m benchmarks.operator`."""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.operator.api import Api, Etcd, connect
from benchmarks.operator.control_plane import ControlPlane, control_plane
from benchmarks.operator.objects import N_HOSTS
from benchmarks.operator.processes import (
    ROOT,
    URL,
    CpuClock,
    Operator,
    Started,
    read_cpu_s,
    read_memory_mb,
    reset_peak,
    start,
)
from benchmarks.operator.results import find_cold_start_s, find_latencies, read_lines
from benchmarks.operator.world import World, cancel

GOAL_JOBS: Final = 1_000
GOAL_P99_S: Final = 2.0
GOAL_MB: Final = 300.0
"""The most that the operator may take with that many jobs."""

_DOWN_S: Final = 10.0
_COLD_START_LIMIT_S: Final = 300.0
_SETTLE_S: Final = 3.0
"""Seconds for what is on its way at the end of a measurement."""


async def main() -> int:
    """Measure, print, and write the results. 0: the operator keeps within the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 300, 1_000, 3_000])
    parser.add_argument("--warm-s", type=float, default=75.0, help="each job commits once in a minute")
    parser.add_argument("--steady-s", type=float, default=60.0)
    parser.add_argument("--operator-log", type=Path, help="a file that stays")
    parser.add_argument("--hold", action="store_true", help="after the last size, load on until Ctrl-C")
    parser.add_argument("--name", default=f"load-{os.getpid()}", help="of the control plane")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "operator.json")
    options = parser.parse_args()
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # and remove the control plane
    rows = []
    with control_plane(options.name) as plane, tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        async with connect(plane.url, plane.certificates) as api:
            bench = Bench(api, plane, Path(name), stack, options)
            await bench.begin()
            for n_jobs in options.jobs:
                rows.append(await bench.measure(n_jobs))
                _print_row(rows[-1])
                _write(options.out, rows)
    beyond = [row for row in rows if row["jobs"] == GOAL_JOBS and not _is_within_goals(row)]
    for row in beyond:
        print(f"BEYOND {GOAL_P99_S} s or {GOAL_MB:.0f} MB: {row['jobs']} jobs")
    return 1 if beyond else 0


class Bench:
    """One control plane with a growing number of jobs."""

    def __init__(
        self, api: Api, plane: ControlPlane, folder: Path, stack: ExitStack, options: argparse.Namespace
    ) -> None:
        self._plane = plane
        self._folder = folder
        self._stack = stack
        self._options = options
        self._world = World(api=api, etcd=Etcd(api=replace(api, url=plane.etcd_url)))
        self._began = time.monotonic()

    async def begin(self) -> None:
        """Make what all jobs need, and start the operator."""
        await self._world.prepare()
        log = self._options.operator_log or self._plane.folder / "operator.log"
        self._operator = Operator(self._plane.operator_kubeconfig, log)
        self._stack.callback(self._operator.stop)

    async def measure(self, n_jobs: int) -> dict[str, Any]:
        """Make jobs until there are that many, and measure: their start, a steady minute, a cold start."""
        options, began = self._options, time.monotonic()
        restarts = self._operator.restarts
        kept = asyncio.create_task(self._keep_operator())
        reset_peak(self._operator.pid)
        grown = CpuClock(self._groups({}))
        print(f"making {n_jobs} jobs", flush=True)
        await self._world.grow(n_jobs)
        row: dict[str, Any] = {"jobs": n_jobs, "pods": n_jobs * N_HOSTS, "nodes": len(self._world.nodes)}
        row["making"] = {"took_s": round(time.monotonic() - began, 1), "cores": grown.shares()}
        row["making"]["peak_mb"] = round(read_memory_mb(self._operator.pid)[1])
        beats = asyncio.create_task(self._world.keep_beating())
        with ExitStack() as stack:
            watcher, seen = self._start(stack, "watching", self._plane.url, str(self._plane.certificates))
            reporter, sent = self._start_reporter(stack)
            await asyncio.sleep(options.warm_s)
            others = {"reporter": [reporter.pid], "watcher": [watcher.pid]}
            row["running"] = await self._world.count_running()
            row["steady"] = await self._measure_steady(others, sent, seen)
            row["restarts"] = self._operator.restarts - restarts
            _print_row(row)
            await cancel(kept)
            row["cold start"] = await self._measure_cold_start(others, sent, seen)
            if options.hold and n_jobs == options.jobs[-1]:
                print(f"held: the operator is process {self._operator.pid}", flush=True)
                await asyncio.Event().wait()
        await cancel(beats)
        return row

    async def _keep_operator(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._operator.restart_if_ended()

    async def _measure_steady(self, others: dict[str, list[int]], sent: Path, seen: Path) -> dict[str, Any]:
        begun, memory = time.monotonic(), []
        reset_peak(self._operator.pid)
        cores, audit = CpuClock(self._groups(others)), self._plane.open_audit()
        while time.monotonic() < begun + self._options.steady_s:
            await asyncio.sleep(1)
            memory.append(read_memory_mb(self._operator.pid))
        shares, took_s = cores.shares(), time.monotonic() - begun
        peak_mb = max(peak for _, peak in memory)
        requests = self._plane.count_requests(audit, took_s)
        await asyncio.sleep(_SETTLE_S)
        latencies = find_latencies(read_lines(sent), read_lines(seen), begun, begun + took_s)
        return {
            "seconds": round(took_s, 1),
            **latencies,
            "operator_mb": round(sum(now for now, _ in memory) / len(memory)),
            "operator_peak_mb": round(peak_mb),
            "cores": shares,
            "requests_per_s": requests,
        }

    async def _measure_cold_start(
        self, others: dict[str, list[int]], sent: Path, seen: Path
    ) -> dict[str, Any]:
        down = time.monotonic()
        self._operator.stop()
        await asyncio.sleep(max(0.0, _DOWN_S + down - time.monotonic()))
        up = time.monotonic()
        self._operator.start()
        cores = CpuClock(self._groups(others))
        found: dict[str, Any] = {}
        while "all_right_s" not in found and time.monotonic() < up + _COLD_START_LIMIT_S:
            await asyncio.sleep(1)
            found = find_cold_start_s(read_lines(sent), read_lines(seen), down, up)
        now_mb, peak_mb = read_memory_mb(self._operator.pid)
        return {
            **found,
            "operator_mb": round(now_mb),
            "operator_peak_mb": round(peak_mb),
            "cores": cores.shares(),
        }

    def _groups(self, others: dict[str, list[int]]) -> dict[str, Callable[[], float]]:
        pids = {"world": [os.getpid()], **self._plane.list_pids(), **others}
        groups = {name: partial(read_cpu_s, each) for name, each in pids.items()}
        return {"operator": self._operator.read_cpu_s, **groups}

    def _start(self, stack: ExitStack, module: str, *arguments: str) -> tuple[Started, Path]:
        lines = Path(tempfile.mkstemp(prefix=module, dir=self._folder)[1])
        log = self._plane.folder / f"{module}.log"
        started = start([f"benchmarks.operator.{module}", *arguments, str(lines)], log)
        stack.callback(started.stop)
        return started, lines

    def _start_reporter(self, stack: ExitStack) -> tuple[Started, Path]:
        from_s = time.monotonic() - self._began
        jobs = self._folder / "jobs.json"
        jobs.write_text(json.dumps({"age_s": from_s, "jobs": self._world.reporters}), encoding="utf-8")
        ca_file = self._folder / "ca.crt"
        ca_file.write_text(self._plane.read_endpoint_ca(), encoding="ascii")
        return self._start(stack, "reporting", str(jobs), URL, str(ca_file))


def _is_within_goals(row: dict[str, Any]) -> bool:
    p99_s, peak_mb = row["steady"]["commit_p99_s"], row["steady"]["operator_peak_mb"]
    return p99_s is not None and bool(p99_s < GOAL_P99_S and peak_mb < GOAL_MB)


def _print_row(row: dict[str, Any]) -> None:
    print(json.dumps(row, indent=1), flush=True)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    facts = {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts, "results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
