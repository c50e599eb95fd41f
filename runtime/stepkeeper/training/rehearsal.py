"""Take part in `stepkeeper rehearse`: record the metrics of all steps, and end this process at a chosen one."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from typing_extensions import override

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract.rehearsal import (
    PREEMPTED_FILE_NAME,
    REHEARSAL_FILE_NAME,
    Rehearsal,
    metrics_file_name,
)
from stepkeeper.contract.wire import decode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.training.environment import Environment

__all__ = ["RehearsedProgress", "collect_progress"]


def collect_progress(
    environment: Environment | None, rank_group: RankGroup, send: Callable[[TrainerState], None]
) -> Progress:
    """Return the object that collects this process's state for reports, in a rehearsal one that takes part in it."""
    folder = None if environment is None else environment.places.attempt_folder
    if folder is None or not (file := folder / REHEARSAL_FILE_NAME).exists():
        return Progress(send)
    rehearsal = decode(Rehearsal, json.loads(file.read_bytes()))
    is_chosen = rank_group.rank == rehearsal.rank % rank_group.world_size
    return RehearsedProgress(
        send, folder, rank=rank_group.rank, rehearsal=rehearsal if is_chosen else Rehearsal()
    )


class RehearsedProgress(Progress):
    """Record the metrics of all steps in the attempt's folder, and preempt this process once, at a step."""

    def __init__(
        self, send: Callable[[TrainerState], None], folder: Path, *, rank: int, rehearsal: Rehearsal
    ) -> None:
        super().__init__(send)
        self._file: Final = folder / metrics_file_name(rank)
        self._sign: Final = folder / PREEMPTED_FILE_NAME
        self._rehearsal = rehearsal

    @override
    def record_step(self, step: int, metrics: Mapping[str, object] | None) -> None:
        super().record_step(step, metrics)
        numbers = {str(name): _text(value) for name, value in (metrics or {}).items()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([step, numbers])}\n")
        at_step = self._rehearsal.step
        if at_step is not None and step >= at_step and not self._sign.exists():
            self._sign.write_text(str(step))
            self._preempt()

    def _preempt(self) -> None:
        kill = threading.Timer(self._rehearsal.grace_s, os.kill, (os.getpid(), signal.SIGKILL))
        kill.daemon = True
        kill.start()
        os.kill(os.getpid(), signal.SIGKILL if self._rehearsal.kills else signal.SIGTERM)


def _text(value: object) -> str:
    """Return the value with all its bits. Reading a device here, in the train thread, is allowed."""
    if isinstance(value, torch.Tensor):  # repr would round the elements
        return repr(value.item() if value.numel() == 1 else value.tolist())
    if isinstance(value, np.ndarray):
        return value.tobytes().hex()
    return repr(value)
