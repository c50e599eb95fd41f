"""Start the launcher of one attempt with all that a pod would have, signal it, and clean up what it leaves."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from stepkeeper.contract import (
    ATTEMPT_FOLDER_VARIABLE,
    SETTINGS_FILE_NAME,
    SUPERVISOR_VARIABLE,
    TOKEN_FILE,
    Identity,
    Rehearsal,
    Settings,
    Termination,
)
from stepkeeper.contract.rehearsal import PREEMPTED_FILE_NAME, REHEARSAL_FILE_NAME
from stepkeeper.contract.wire import encode_json
from stepkeeper.ending import message

__all__ = ["Attempt", "AttemptPlan", "build_command"]

_LEAVE_S: Final = 3.0
"""Seconds after the launcher's end in which companions and workers end themselves."""

_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """All that an attempt is started with."""

    number: int
    command: Sequence[str]
    folder: Path
    """A folder for the attempt's files, which is made."""

    settings: Settings
    token: str
    grace_s: int
    """Seconds from a notice until the training is killed."""

    rehearsal: Rehearsal | None = None
    output: Path | None = None
    """The file that the training's output is appended to; None: this process's output."""


def build_command(words: Sequence[str], n_procs: int) -> list[str]:
    """Build the command of the training: a script is run by this Python, and by torchrun if it has several processes.

    Raises ValueError if several processes are asked of a command that isn't a script.
    """
    is_script = words[0].endswith(".py")
    if n_procs == 1:
        return [sys.executable, *words] if is_script else list(words)
    if not is_script:
        raise ValueError(f"--nproc {n_procs} needs a script, such as train.py, and not {words[0]!r}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_procs}"]
    return [sys.executable, *torchrun, *words]


class Attempt:
    """The processes of one attempt. They aren't in this process's group: Ctrl-C reaches only this process."""

    def __init__(self, plan: AttemptPlan, on_end: Callable[[int], None]) -> None:
        """Start the launcher. `on_end` gets its exit code, in another thread. Raises OSError."""
        self._plan, self._termination_file = plan, plan.folder / "termination"
        plan.folder.mkdir(parents=True)
        (plan.folder / SETTINGS_FILE_NAME).write_bytes(plan.settings.to_json())
        (plan.folder / Path(TOKEN_FILE).name).write_text(plan.token, encoding="ascii")
        if plan.rehearsal is not None:
            (plan.folder / REHEARSAL_FILE_NAME).write_bytes(encode_json(plan.rehearsal))
        # As the kubelet does: a companion writes no message for a killed trainer without it.
        self._termination_file.touch()
        output = None if plan.output is None else plan.output.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepkeeper.launch", *plan.command],
                # Output that a pipe gets late is no help beside the lines of the run.
                env={"PYTHONUNBUFFERED": "1", **os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        threading.Thread(target=lambda: on_end(self._process.wait()), name="attempt", daemon=True).start()

    @property
    def was_preempted(self) -> bool:
        """True if the rehearsal has preempted the attempt."""
        return (self._plan.folder / PREEMPTED_FILE_NAME).exists()

    def notify(self) -> None:
        """Ask the training to save and stop."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the attempt at once."""
        while pids := self._find_processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def clean_up(self) -> Termination | None:
        """Wait for the processes that the launcher has left, kill those that stay, and return the message."""
        ends_s = time.monotonic() + _LEAVE_S
        while self._find_processes() and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        self.kill()
        return message.read(self._termination_file)

    def _environment(self) -> dict[str, str]:
        identity = Identity(
            namespace="",
            job="run",
            job_uid="",
            pod=socket.gethostname(),
            pod_uid="",
            node=socket.gethostname(),
            jobset_number=0,
            restart_attempt=self._plan.number,
            slice_index=0,
            host_index=0,
            n_slices=1,
            hosts_per_slice=1,
            coordinator="localhost",
            grace_s=self._plan.grace_s,
            termination_file=str(self._termination_file),
        )
        return {
            **{Identity.variable(each.name): str(getattr(identity, each.name)) for each in fields(Identity)},
            ATTEMPT_FOLDER_VARIABLE: str(self._plan.folder),
            SUPERVISOR_VARIABLE: str(os.getpid()),
        }

    def _find_processes(self) -> list[int]:
        """Find the processes that have inherited the attempt's folder, whatever their parents and sessions are."""
        mark, own = f"{ATTEMPT_FOLDER_VARIABLE}={self._plan.folder}".encode(), str(os.getpid())
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and folder.name != own:
                # A process may end meanwhile, or belong to another user.
                with suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found
