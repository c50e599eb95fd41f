"""Parts of the trainers that tests start as processes: their files, their process group, and what they print."""

import ctypes
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper import CheckpointManager, Options
from stepkeeper.contract import EveryInterval, Interval, Settings
from stepkeeper.policy.keep import KeepPolicy
from stepkeeper.policy.save import SavePolicy
from stepkeeper.save import persist
from stepkeeper.save.share import write_share
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity

_SAYING: Final = threading.Lock()


def say(event: str, **values: Any) -> None:
    """Print a line of JSON, which `rank_talk.hear` reads."""
    with _SAYING:
        print(json.dumps({"event": event, **values}), flush=True)


def places_in(folder: Path, rank: int | None = None) -> PodPaths:
    """Return the places of a pod's files in `folder`; those that a pod writes and `rank` shares with no other."""
    end = "" if rank is None else f".{rank}"
    return PodPaths(
        settings_folder=folder,
        notice_file=folder / f"notice{end}",
        termination_file=folder / f"termination{end}",
        token_file=folder / "token",
    )


def in_pod(
    folder: Path,
    rank: int | None = None,
    *,
    root: Path | None = None,
    steps: int = 10**6,
    options: Options = Options(),
    **identity: Any,
) -> CheckpointManager:
    """Open the manager of a pod as a training in a container does, from its environment and its settings.

    The job saves every `steps` steps to `root`, or to `folder`/root.
    """
    interval = Interval(every=EveryInterval(steps=steps))
    settings = Settings(uri=(root or folder / "root").as_uri(), interval=interval)
    path = folder / f"settings.{rank}"
    path.write_bytes(settings.to_json())
    path.rename(folder / "settings.json")
    os.environ.update(pod_environ(pod_identity(**identity)))
    return CheckpointManager.from_env(_places=places_in(folder, rank), options=options)


def open_manager(
    root: str | Path, save: SavePolicy | int = 1, keep: KeepPolicy | int | None = None, **options: Any
) -> CheckpointManager:
    """Open a manager of a process that heeds no notice, and saves each step unless something else is said."""
    return CheckpointManager(root, save=save, keep=keep, options=Options(stop_on_notice=False, **options))


def join(rank: int, world_size: int, folder: Path, timeout_s: float = 120.0) -> None:
    """Form a process group on gloo; rank 0 holds its store."""
    port_file = folder / f"port-of-{world_size}"
    if rank == 0:
        store = TCPStore("localhost", 0, world_size, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        store = TCPStore("localhost", int(port_file.read_text()), world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    if rank == 0:
        # All have come. The ranks of the next start in this folder must not find it.
        port_file.unlink()


def slow_shares(write: Any) -> None:
    """Have `write(write_share, *arguments)` write this rank's share of each save."""
    persist.write_share = lambda *args, **kwargs: write(write_share, *args, **kwargs)  # type: ignore[attr-defined]  # the name that is called


class _Deadline(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Mutex:
    """A locked mutex of C. No signal ends the wait for it, and no handler of Python runs in that."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(self._mutex)

    def unlock(self) -> None:
        ctypes.CDLL(None).pthread_mutex_unlock(self._mutex)

    def wait(self, seconds: float, *, hold_python: bool = False) -> None:
        """Wait until it is unlocked, or for so long.

        Args:
            seconds: The longest wait.
            hold_python: True to keep the interpreter's lock meanwhile.

        """
        library = ctypes.PyDLL(None) if hold_python else ctypes.CDLL(None)
        library.pthread_mutex_timedlock(self._mutex, ctypes.byref(_Deadline(int(time.time() + seconds), 0)))
