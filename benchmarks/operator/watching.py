"""Watch all jobs, and write a line for each status that the API server shows: a process of its own."""

import asyncio
import json
import sys
import time
from pathlib import Path

from benchmarks.operator.api import connect

from stepkeeper_operator.cluster.resources import TRAINING_JOBS


async def main(url: str, certificates: str, log_file: str) -> None:
    """Watch until the process is ended."""
    with Path(log_file).open("w", encoding="utf-8", buffering=1) as log:
        async with connect(url, Path(certificates)) as api:
            path = TRAINING_JOBS.path()
            version = (await api.ask("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"]
            log.write("{}\n")
            async for event in api.watch(path, version):
                raw, at = event["object"], time.monotonic()
                status = raw.get("status") or {}
                latest = (status.get("checkpoint") or {}).get("latest") or {}
                seen = {
                    "job": raw["metadata"]["name"],
                    "at": at,
                    "step": (status.get("progress") or {}).get("step"),
                    "sequence": latest.get("sequence", 0),
                    "phase": status.get("phase"),
                }
                log.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
