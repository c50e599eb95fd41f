"""Bulk data to and from a bucket: `python -m benchmarks.storage`, against an emulator behind a long line."""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import google_crc32c
from benchmarks.storage.uploads import MIB, READS, UPLOADS, Bulk, seconds_of

from stepcluster import binaries
from stepkeeper.storage.crc import block_crcs, crc32c
from stepkeeper.storage.gcs import GcsStore
from stepkeeper.testing.gcs import BUCKET, fake_gcs_server


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


def _measured(name: str, size_bytes: int, repeat: int, work: Callable[[], object]) -> None:
    try:
        times_s = [seconds_of(work) for _ in range(repeat)]
    except Exception as error:  # a way that the server doesn't know is a result, too
        print(f"  {name:42} {type(error).__name__}: {str(error)[:80]}", flush=True)
        return
    best_s, median_s = min(times_s), statistics.median(times_s)
    print(
        f"  {name:42} {size_bytes / best_s / MIB:8.0f} MiB/s best {size_bytes / median_s / MIB:8.0f} median",
        flush=True,
    )


def _bucket(address: str, folder: Path, options: argparse.Namespace) -> None:
    os.environ["STORAGE_EMULATOR_HOST"] = address
    store = GcsStore(bucket=BUCKET, prefix=secrets.token_hex(8))
    bulk = Bulk(store, folder, options.size_mib * MIB, options.streams)
    for name, upload in UPLOADS.items():
        _measured(name, len(bulk.data), options.repeat, partial(upload, bulk))
    store.write("read", [bulk.data])
    for name, read in READS.items():
        _measured(f"read: {name}", len(bulk.data), options.repeat, partial(read, bulk, "read"))
    for stat in store.list(""):
        store.delete(stat.path)
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=128)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate-mib-s", type=float, default=16.0, help="of each connection on the long line")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="of each answer on the long line")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    print(f"crc32c: {google_crc32c.implementation}, {os.cpu_count()} CPUs")
    data = memoryview(secrets.token_bytes(MIB) * 256)
    _measured("crc32c of one buffer", data.nbytes, options.repeat, lambda: crc32c(data))
    _measured("crc32c of its blocks", data.nbytes, options.repeat, lambda: block_crcs([data], 16 * MIB))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as address:
            print(f"{options.size_mib} MiB, {options.streams} streams, without a line between")
            _bucket(address, folder, options)
            print(f"{options.rate_mib_s:.0f} MiB/s for each stream, {options.delay_ms:.0f} ms")
            with _line(address, options.rate_mib_s, options.delay_ms) as far:
                _bucket(far, folder, options)


if __name__ == "__main__":
    main()
