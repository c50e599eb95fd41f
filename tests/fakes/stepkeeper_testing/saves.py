"""Savers and their jobs, with stand-ins for the companion and for other ranks."""

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import END_RESERVE_S, NoticeSource
from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.ending.schedule import Notice, Schedule
from stepkeeper.ending.shell import EndingShell
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.job import SaveJob
from stepkeeper.save.saver import Saver
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot
from stepkeeper_testing.memory import MemoryStore

REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


def record_of(slot: int, folder: str = "1/x") -> CommitRecord:
    """Make the record of a commit of the step that has the slot's number."""
    return CommitRecord(slot=slot, claim=0, step=slot, folder=folder, size_bytes=1, manifest=REF)


def saver_with(
    companion: object = None,
    rank_group: RankGroup | None = None,
    *,
    store: MemoryStore | None = None,
    max_pending: int = 1,
    **options: Any,
) -> Saver:
    return Saver(
        store or MemoryStore(),
        cast(Companion, companion),
        rank_group or SoloRankGroup(),
        Progress(lambda _state: None),
        max_pending=max_pending,
        **options,
    )


class _Told:
    """The notices of a process that has just been told."""

    def __init__(self, left_s: float) -> None:
        self.first = Notice(source=NoticeSource.SIGTERM, monotonic_s=time.monotonic())
        self._grace_s = left_s + END_RESERVE_S

    @property
    def schedule(self) -> Schedule:
        return Schedule(grace_s=self._grace_s, notices=(self.first,), now_s=time.monotonic())


def shell_of(saver: Saver, step: int, *, left_s: float) -> EndingShell:
    """Make the end of a rank that stops at `step`, `left_s` seconds before it is killed."""
    shell: Any = object.__new__(EndingShell)
    shell.notices = _Told(left_s)
    shell._watch = SimpleNamespace(on_stop_agreed=list)
    shell._parts = SimpleNamespace(progress=saver._progress)
    shell._saver, shell._rank_group = saver, saver._rank_group
    shell._last_request = SaveRequest(step=step, state={"step": step}, is_last=True)
    return cast(EndingShell, shell)


def job_of(snapshot: Snapshot, region: Region, transfer: Future[None] | None = None) -> SaveJob:
    """Make the job of step 7, whose copies have come from the devices unless `transfer` is given."""
    if transfer is None:
        transfer = Future()
        transfer.set_result(None)
    return SaveJob(
        name="save/0",
        in_flight=InFlight(7),
        origin=None,
        is_continued=True,
        snapshot=snapshot,
        region=region,
        transfer=transfer,
    )
