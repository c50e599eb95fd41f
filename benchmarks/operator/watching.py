"""Watch all jobs, and write a line for each status that the API server shows: a process of its own."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from benchmarks.operator.api import connect

from stepkeeper_operator.cluster.resources import TRAINING_JOBS


def main(url: str, certificates: str, log_file: str) -> None:
    """Watch until the process is ended."""
    with Path(log_file).open("w", encoding="utf-8", buffering=1) as log:
        asyncio.run(_watch(url, Path(certificates), log))


async def _watch(url: str, certificates: Path, log: TextIO) -> None:
    async with connect(url, certificates) as api:
        path = TRAINING_JOBS.path()
        version = (await api.ask("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"]
        async for event in api.watch(path, version):
            raw, at = event["object"], time.monotonic()
            status = raw.get("status") or {}
            latest = (status.get("checkpoint") or {}).get("latest") or {}
            seen = {
                "job": raw["metadata"]["name"],
                "at": at,
                "step": (status.get("progress") or {}).get("step"),
                "sequence": latest.get("sequence", 0),
            }
            log.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
