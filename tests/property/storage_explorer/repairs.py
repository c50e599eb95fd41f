"""Define damage to a log, and what people do about it, by the shipped code."""

from collections.abc import Sequence
from typing import final

from storage_explorer.replay import IMPATIENT, Process, Program

from stepkeeper.errors import (
    DamagedEntryError,
    LogGapError,
    RefusedError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out, plan_repair
from stepkeeper.storage.base import Buffer

__all__ = ["beside_damage", "damager", "repairer"]

_DAMAGED_MEANWHILE = 2
"""The most entries that go bad while one person repairs: as many as the scenarios have damagers."""


def damager(*slots: int, gone: bool = False) -> Program:
    """One of these entries of the log goes bad, or away, whichever the schedule says."""

    def run(process: Process) -> None:
        slot = slots[process.choose(len(slots))]
        if process.damage(slot_path(slot), gone=gone):
            process.note("damaged", slot)

    return run


def beside_damage(program: Program) -> Program:
    """The program, which ends where it needs an entry that is damaged."""

    def run(process: Process) -> None:
        try:
            program(process)
        except (DamagedEntryError, LogGapError):
            process.note("stopped")

    return run


def repairer(*, dry_run: bool = False) -> Program:
    """A person repairs the log, or looks what that would do; and says again what had no answer.

    An entry that goes bad once the plan is made ends the repair, loudly, and the next plan has it.
    """

    def run(process: Process) -> None:
        n_damaged_meanwhile = 0
        while True:
            try:
                plan = plan_repair(_Reading(process), patience=IMPATIENT)
                if dry_run:
                    process.note("looked", plan.is_needed)
                    return
                if not plan.is_needed:
                    process.note("nothing-to-repair")
                    return
                log = Log(process, patience=IMPATIENT)
                claim = carry_out(process, log, plan, "stepkeeper repair on a-host", patience=IMPATIENT)
                process.note("repaired", claim.slot)
                return
            except RefusedError:
                # Others are at work.
                process.note("not-repaired")
                return
            except (TransientStorageError, UnknownOutcomeError):
                continue
            except (DamagedEntryError, LogGapError):
                n_damaged_meanwhile += 1
                if n_damaged_meanwhile > _DAMAGED_MEANWHILE:
                    raise

    return run


@final
class _Reading:
    """A root as a plan sees it, which is made without a write."""

    def __init__(self, process: Process) -> None:
        self.uri = process.uri
        self.read = process.read
        self.list = process.list
        self.list_page = process.list_page

    def put_if_absent(self, path: str, data: bytes) -> bool:
        raise AssertionError(f"a plan puts {path}")

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        raise AssertionError(f"a plan writes {path}")

    def delete(self, path: str) -> None:
        raise AssertionError(f"a plan deletes {path}")

    def close(self) -> None:
        """Nothing is open."""
