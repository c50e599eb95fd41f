"""Ways to save CPU tensors: how long each keeps the caller, and how long until all is durable."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.saving.memory import private_bytes
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from typing_extensions import override

from stepkeeper import CheckpointManager, SaveReport
from stepkeeper.dcp import Stager, StorageWriter

__all__ = ["WAYS", "Way"]

State = dict[str, torch.Tensor]


class Way(ABC):
    """One way to save. `begin` returns when the state may change again, `finish` when the bytes are durable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, state: State) -> None:
        """Do what a training does before its first save."""
        del state

    @abstractmethod
    def begin(self, step: int, state: State) -> None:
        """Start a save; when this returns, the state may change again."""

    def finish(self) -> None:
        """Wait until the bytes are durable; nothing to do if `begin` did all."""
        return

    def others_bytes(self) -> int:
        """Return the memory of helper processes, in bytes."""
        return 0

    def persist_s(self) -> Sequence[float]:
        """Return the seconds that each save's bytes took from the snapshot to the disk, if the way has such a part."""
        return ()

    def close(self) -> None:
        """End everything that this way runs."""
        return


class Stepkeeper(Way):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manager = CheckpointManager(str(folder / "root"), save=10**9, keep=1)
        self.reports: list[SaveReport] = []
        self.manager.on_save(self.reports.append)

    @override
    def prepare(self, state: State) -> None:
        self.manager.restore(state)
        # A training is longer at its first step.
        time.sleep(1)

    @override
    def begin(self, step: int, state: State) -> None:
        self.manager.save(step + 1, state)

    @override
    def finish(self) -> None:
        self.manager.wait()

    @override
    def others_bytes(self) -> int:
        return private_bytes(self.manager.health().companion_pid)

    @override
    def persist_s(self) -> Sequence[float]:
        return [report.persist_s for report in self.reports]

    @override
    def close(self) -> None:
        self.manager.close()


class TorchSave(Way):
    @override
    def begin(self, step: int, state: State) -> None:
        with (self.folder / f"{step}.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


class Dcp(Way):
    """Its own writer, which fsyncs; as many threads as ours has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        store = dist.FileStore(str(folder / "meet"), 1)  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def writer(self, step: int) -> FileSystemWriter:
        return FileSystemWriter(self.folder / str(step), thread_count=8)

    @override
    def begin(self, step: int, state: State) -> None:
        save(state, storage_writer=self.writer(step))

    @override
    def close(self) -> None:
        dist.destroy_process_group()


class DcpAsync(Dcp):
    kind = AsyncCheckpointerType.THREAD

    @override
    def begin(self, step: int, state: State) -> None:
        self.future: Any = async_save(
            state, storage_writer=self.writer(step), async_checkpointer_type=self.kind
        )

    @override
    def finish(self) -> None:
        self.future.result()


class DcpProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS

    def __init__(self, folder: Path) -> None:
        # By torch's default its process takes more files for 16,000 tensors than a user may usually have open.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # torch has no types for it
        super().__init__(folder)


class DcpOurs(Dcp):
    """dcp.save, given our writer."""

    @override
    def begin(self, step: int, state: State) -> None:
        save(state, storage_writer=StorageWriter(self.folder / str(step)))


class DcpAsyncOurs(Dcp):
    """dcp.async_save, given our writer and stager."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stager = Stager()

    @override
    def begin(self, step: int, state: State) -> None:
        writer = StorageWriter(self.folder / str(step))
        self.future: Any = async_save(state, storage_writer=writer, async_stager=self.stager)

    @override
    def finish(self) -> None:
        self.future.result()

    @override
    def close(self) -> None:
        self.stager.close()
        super().close()


class Memcpy(Way):
    """Into memory that is there: the least that a copy of CPU tensors takes."""

    @override
    def prepare(self, state: State) -> None:
        self.copies = {name: tensor.clone() for name, tensor in state.items()}

    @override
    def begin(self, step: int, state: State) -> None:
        del step
        for name, tensor in state.items():
            self.copies[name].copy_(tensor)


WAYS: Final[dict[str, Callable[[Path], Way]]] = {
    "stepkeeper": Stepkeeper,
    "torch.save": TorchSave,
    "dcp.save": Dcp,
    "dcp.async_save, thread": DcpAsync,
    "dcp.async_save, process": DcpProcess,
    "dcp.save, ours in it": DcpOurs,
    "dcp.async_save, ours in it": DcpAsyncOurs,
    "warm memcpy": Memcpy,
}
