"""Bulk data to and from a bucket: `python -m benchmarks.storage`, against an emulator over a long line."""

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import google_crc32c
from benchmarks.storage.saves import STATES, data_bytes, order_of, save
from benchmarks.storage.uploads import MIB, READS, UPLOADS, Bulk, bare_streams

from stepcluster import binaries
from stepkeeper.storage.crc import block_crcs, crc32c
from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server

_BARE: Final = "nothing but bytes"
ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The best of several runs."""

    mib_s: float
    cpu_s: float
    """CPU time of this process alone, in seconds."""


@contextmanager
def _line(address: str, rate_mib_s: float, delay_ms: float) -> Iterator[str]:
    port = str(urlsplit(address).port)
    command = [sys.executable, "-m", "benchmarks.storage.line", port]
    command += [str(rate_mib_s * MIB), str(delay_ms / 1000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


@contextmanager
def _store(address: str, streams: int) -> Iterator[GcsStore]:
    """Open an empty prefix, and delete what was written there afterwards."""
    os.environ["STORAGE_EMULATOR_HOST"] = address
    store = GcsStore(bucket=BUCKET, prefix=secrets.token_hex(8), streams=streams)
    try:
        yield store
    finally:
        for stat in store.list(""):
            store.delete(stat.path)
        store.close()


def _timed(size_bytes: int, repeat: int, work: Callable[[], object]) -> Timed:
    """Time `work`, which moves `size_bytes`."""
    runs = []
    for _ in range(repeat):
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        work()
        runs.append((time.perf_counter() - begun_s, time.process_time() - begun_cpu_s))
    best_s, cpu_s = min(runs)
    return Timed(mib_s=round(size_bytes / best_s / MIB, 1), cpu_s=round(cpu_s, 2))


def _ways(address: str, options: argparse.Namespace, size_mib: int, where: str) -> list[dict[str, Any]]:
    print(f"\n{size_mib} MiB, {options.streams} streams, {where}")
    results = []
    with _store(address, options.streams) as store:
        bulk = Bulk(store, size_mib * MIB, options.streams)
        works: dict[str, Callable[[], object]] = {
            name: partial(upload, bulk) for name, upload in UPLOADS.items()
        }
        store.write("read", [bulk.data])
        works |= {f"read: {name}": partial(read, bulk, "read") for name, read in READS.items()}
        for name, work in works.items():
            timed = _timed(bulk.data.nbytes, options.repeat, work)
            print(f"  {name:44} {timed.mib_s:8.1f} MiB/s {timed.cpu_s:8.2f} s of CPU", flush=True)
            results.append({"way": name, "where": where, **asdict(timed)})
    return results


def _shares(address: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the share that a save gets of the rate that the same number of streams reaches.

    A save is timed from its first byte until everything that its commit names is there.
    """
    rate, seconds = options.rate_mib_s, options.seconds
    print(f"\na rank's save, {seconds} s worth of {rate:g} MiB/s for each stream, {options.delay_ms:g} ms")
    results = []
    for streams in (4, 8, 16):
        best = _side_by_side(address, streams, int(streams * rate * seconds) * MIB, options.repeat)
        bare = best.pop(_BARE)
        where, nominal = f"  {streams:3} streams,", streams * rate
        print(f"{where} {_BARE:20} {bare.mib_s:8.1f} MiB/s {bare.mib_s / nominal:7.0%}", flush=True)
        for state, timed in best.items():
            share, of_bare = timed.mib_s / nominal, timed.mib_s / bare.mib_s
            shown = f"{share:7.0%} {of_bare:7.0%} of the bytes alone"
            print(f"{where} {state:20} {timed.mib_s:8.1f} MiB/s {shown}", flush=True)
            row = {"streams": streams, "state": state, "share": round(share, 3), "of_bare": round(of_bare, 3)}
            results.append(row | {"bare_mib_s": bare.mib_s} | asdict(timed))
    return results


def _side_by_side(address: str, streams: int, size_bytes: int, repeat: int) -> dict[str, Timed]:
    """Measure by turns, and return the best of each kind of save and of the bytes alone: other load meets all alike."""
    best: dict[str, Timed] = {}
    for _ in range(repeat):
        with _store(address, streams) as store:
            store.write("warm", [b"x"])
            bulk = Bulk(store, size_bytes, streams)
            works = {_BARE: (size_bytes, partial(bare_streams, bulk))}
            for state in STATES:
                order = order_of(state, size_bytes)
                works[state] = data_bytes(order), partial(save, store, order, bulk.data)
            for name, (n_bytes, work) in works.items():
                timed = _timed(n_bytes, 1, work)
                best[name] = max(best.get(name, timed), timed, key=lambda each: each.mib_s)
    return best


def _crc(repeat: int) -> dict[str, float]:
    data = memoryview(secrets.token_bytes(MIB) * 256)
    one = _timed(data.nbytes, repeat, lambda: crc32c(data))
    blocks = _timed(data.nbytes, repeat, lambda: block_crcs([data], 16 * MIB))
    print(
        f"crc32c ({google_crc32c.implementation}): {one.mib_s:.0f} MiB/s, of blocks {blocks.mib_s:.0f} MiB/s"
    )
    return {"one_buffer_mib_s": one.mib_s, "blocks_mib_s": blocks.mib_s}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8, help="for the comparison of ways")
    parser.add_argument("--rate-mib-s", type=float, default=1.0, help="of each connection on the long line")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="of each answer on the long line")
    parser.add_argument("--seconds", type=float, default=8.0, help="that a save takes at best")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "storage.json")
    options = parser.parse_args()
    facts = {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "line": {"rate_mib_s": options.rate_mib_s, "delay_ms": options.delay_ms},
    }
    crc = _crc(options.repeat)
    with tempfile.TemporaryDirectory() as name:
        with fake_gcs_server(binaries.ensure()["fake-gcs-server"], Path(name)) as address:
            with _line(address, options.rate_mib_s, options.delay_ms) as far:
                shares = _shares(far, options)
                size_mib = int(options.streams * options.rate_mib_s * options.seconds / 2)
                ways = _ways(far, options, size_mib, "on the long line")
            ways += _ways(address, options, 8 * size_mib, "straight")
    results = {"machine": facts, "crc32c": crc, "saves": shares, "ways": ways}
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
