"""Report for all jobs as their companions do: a process of its own, which writes a line for each report and commit.

One companion of each job reports: on a new connection each, with the token of its pod, at once after a commit and
else every ten seconds. Without an answer it backs off.
"""

import asyncio
import json
import random
import ssl
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

from benchmarks.operator.objects import NAMESPACE

from stepkeeper.contract import Directive, Head, Report, ReportedCommit, ReportPhase

COMMIT_INTERVAL_S: Final = 60.0
_STEP_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_BACK_OFF_MOST_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class Companion:
    """The companion of one job's rank 0."""

    job: dict[str, Any]
    url: str
    trust: ssl.SSLContext
    log: TextIO
    sequence: int
    """That of the latest commit."""

    began: float
    """Time of its first step, by the monotonic clock of the machine."""

    latest: ReportedCommit | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        interval_s, failures = 10.0, 0
        # Jobs were not started together.
        next_commit = time.monotonic() + random.uniform(0, COMMIT_INTERVAL_S)
        await asyncio.sleep(random.uniform(0, interval_s))
        unanswered: list[ReportedCommit] = []
        while True:
            now = time.monotonic()
            if now >= next_commit:
                unanswered.append(self._commit())
                self._note("commit", at=next_commit, sequence=self.sequence)
                next_commit += COMMIT_INTERVAL_S
            report = self._report(tuple(unanswered))
            self._note("report", at=now, step=report.step, sequence=self.sequence)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    directive = await self._post(report.to_json())
            except (OSError, ValueError, EOFError) as error:
                failures += 1
                self._note("failure", at=time.monotonic(), error=repr(error))
                full_s = min(_BACK_OFF_MOST_S, 2.0 ** (failures - 1))
                await asyncio.sleep(full_s * random.uniform(0.5, 1.0))
                continue
            self._note("answer", at=time.monotonic(), took_s=time.monotonic() - now)
            failures, interval_s = 0, directive.report_interval_s
            unanswered.clear()
            await asyncio.sleep(max(0.0, min(interval_s, next_commit - time.monotonic())))

    def _commit(self) -> ReportedCommit:
        self.sequence += 1
        step = self._step()
        self.latest = ReportedCommit(
            sequence=self.sequence,
            step=step,
            uri=f"gs://bucket/runs/{self.job['name']}/{step}/1-abcdefgh",
            size_bytes=10**12,
            duration_millis=4000,
            time_unix_s=int(time.time()),
        )
        return self.latest

    def _report(self, commits: tuple[ReportedCommit, ...]) -> Report:
        step, latest, head = self._step(), self.latest, None
        if latest is not None:
            head = Head(
                sequence=latest.sequence, step=latest.step, uri=latest.uri, size_bytes=latest.size_bytes
            )
        return Report(
            phase=ReportPhase.TRAINING,
            root="load-root",
            claim=1,
            tail=self.sequence,
            head=head,
            step=step,
            step_millis=int(_STEP_S * 1000),
            commits=commits,
            metrics={"loss": f"{1 / (step + 1):.6f}", "lr": "0.0003"},
        )

    def _step(self) -> int:
        return int((time.monotonic() - self.began) / _STEP_S)

    def _note(self, kind: str, **fields: object) -> None:
        self.log.write(json.dumps({"kind": kind, "job": self.job["name"], **fields}) + "\n")

    async def _post(self, body: bytes) -> Directive:
        """Send a report on a connection of its own. Raises OSError, ValueError or EOFError without a good answer."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=self.trust)
        try:
            path = f"/v1/namespaces/{NAMESPACE}/jobs/{self.job['name']}/report"
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept-Encoding: identity\r\n"
                f"Content-Length: {len(body)}\r\nAuthorization: Bearer {self.job['token']}\r\n"
                "Content-Type: application/json\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            lines = answer.decode().lower().splitlines()
            length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
            data = await reader.readexactly(length)
            if " 200 " not in lines[0]:
                raise ValueError(f"{lines[0]}: {data.decode()[:200]}")
            return Directive.from_json(data)
        finally:
            writer.close()


def main(jobs_file: str, url: str, ca_file: str, log_file: str) -> None:
    """Report for the jobs in a file until the process is ended."""
    trust = ssl.create_default_context(cafile=ca_file)
    jobs = json.loads(Path(jobs_file).read_text(encoding="utf-8"))
    # A later process continues the jobs' steps and commits.
    began, sequence = time.monotonic() - jobs["age_s"], 1 + int(jobs["age_s"])
    with Path(log_file).open("w", encoding="utf-8", buffering=1) as log:
        companions = [
            Companion(job=job, url=url, trust=trust, log=log, sequence=sequence, began=began)
            for job in jobs["jobs"]
        ]
        asyncio.run(_run_all(companions))


async def _run_all(companions: Iterable[Companion]) -> None:
    await asyncio.gather(*(companion.run() for companion in companions))


if __name__ == "__main__":
    main(*sys.argv[1:])
