"""Rehearse preemptions of a training: run it undisturbed and preempted, and compare the two."""

import json
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stepkeeper.contract import ExitCode, Interval, Rehearsal, RestartLimits, Settings
from stepkeeper.contract.rehearsal import metrics_file_name
from stepkeeper.supervise.rehearsal_rules import (
    StepRecord,
    choose_preemptions,
    describe_plan,
    judge_rehearsal,
)
from stepkeeper.supervise.supervisor import INTERRUPTED, RunOptions, Supervisor
from stepkeeper.supervise.terminal import RunTerminal

__all__ = ["RehearsalOptions", "rehearse"]

_EXACT: Final = 0
_NOT_EXACT: Final = 1
_TAIL_LINES: Final = 20
_UNDISTURBED, _PREEMPTED = "undisturbed", "preempted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalOptions:
    """The training to rehearse, and how."""

    command: Sequence[str]
    interval: Interval
    n_preemptions: int
    seed: int | None
    """None chooses one."""

    grace_s: int = 30


def rehearse(options: RehearsalOptions, terminal: RunTerminal) -> int:
    """Rehearse, print the result, and return 0 if the training resumes exactly, else 1.

    A temporary folder has the roots and outputs of both trainings, and stays if they differ.
    """
    folder = Path(tempfile.mkdtemp(prefix="stepkeeper-rehearsal-"))
    seed = secrets.randbelow(1 << 16) if options.seed is None else options.seed
    code = _Rehearser(options, terminal, folder, seed).run()
    if code == _EXACT:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        terminal.print_line(f"seed {seed}; the roots and outputs of both are in {folder}")
    return code


class _Rehearser:
    def __init__(self, options: RehearsalOptions, terminal: RunTerminal, folder: Path, seed: int) -> None:
        self._options, self._terminal, self._folder, self._seed = options, terminal, folder, seed

    def run(self) -> int:
        if code := self._train(_UNDISTURBED, (Rehearsal(),)):
            return code
        # It may have stopped and continued by itself.
        known = [each for part in self._read_steps(_UNDISTURBED) for each in part]
        if not known:
            self._terminal.print_line(
                "there is nothing to compare: the script called step() of no manager that it opened with "
                "CheckpointManager.from_env()"
            )
            return _NOT_EXACT
        plan = choose_preemptions(
            self._seed, self._options.n_preemptions, max(each.step for each in known), self._options.grace_s
        )
        self._terminal.print_line(f"seed {self._seed}: {describe_plan(plan)}")
        if code := self._train(_PREEMPTED, (*plan, Rehearsal())):
            return code
        return self._compare(known)

    def _train(self, name: str, plans: Sequence[Rehearsal]) -> int:
        """Train once to the end, and return 0, or another code after a message."""
        output = self._folder / f"{name}.txt"
        options = RunOptions(
            command=self._options.command,
            settings=Settings(uri=self._uri_of(name), interval=self._options.interval),
            grace_s=self._options.grace_s,
            limits=RestartLimits(max_failures=0, max_starts=len(plans) + 1, initial_wait_s=0),
            plans=plans,
            folder=self._folder / f"{name}-attempts",
            output=output,
            is_brief=True,
        )
        self._terminal.print_line(f"{name}: started")
        code = Supervisor(options, replace(self._terminal, label=f"{name}: ")).run()
        if code in {ExitCode.DONE, ExitCode.SAVED, INTERRUPTED}:
            return INTERRUPTED if code else code
        tail = output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        self._terminal.print_line("\n".join([f"the {name} training failed; the end of its output:", *tail]))
        return _NOT_EXACT

    def _uri_of(self, name: str) -> str:
        return (self._folder / name).as_uri()

    def _read_steps(self, name: str) -> list[list[StepRecord]]:
        """Read the steps of rank 0, by attempt."""
        attempts = self._folder / f"{name}-attempts"
        files = [
            attempts / str(number) / metrics_file_name(0)
            for number in range(1, len(list(attempts.iterdir())) + 1)
        ]
        return [_read_lines(file) for file in files]

    def _compare(self, undisturbed: Sequence[StepRecord]) -> int:
        from stepkeeper.supervise.final_states import compare_latest  # it imports torch

        state = compare_latest(self._uri_of(_UNDISTURBED), self._uri_of(_PREEMPTED))
        result = judge_rehearsal(undisturbed, self._read_steps(_PREEMPTED), state)
        for line in result.lines:
            self._terminal.print_line(line)
        return _EXACT if result.is_exact else _NOT_EXACT


def _read_lines(file: Path) -> list[StepRecord]:
    """Read the steps that an attempt recorded; nothing if it finished none."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [StepRecord(step=step, metrics=metrics) for step, metrics in map(json.loads, lines)]
