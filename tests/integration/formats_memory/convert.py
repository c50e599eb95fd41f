"""One conversion in a process of its own, and by how many bytes its memory grew: convert.py CALL SRC DST.

convert.py make FOLDER FILE_BYTES LARGEST_BYTES writes what is converted.
"""

import re
import sys
import threading
import warnings
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper.checkpoint import (
    CommitFiles,
    SaveOrder,
    Structure,
    TensorOrder,
    finish_checkpoint,
    write_checkpoint,
)
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_planners import SPMDSavePlanner, formats
from stepkeeper_testing.pod import pod_identity


class AnonymousMemory:
    """The most that this process had while the block ran, beyond what it had before."""

    def __enter__(self) -> Self:
        self._before_bytes = self._most_bytes = _anonymous_bytes()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._watch.join()

    @property
    def grown_bytes(self) -> int:
        return self._most_bytes - self._before_bytes

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self._most_bytes = max(self._most_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


class InColumns(DefaultSavePlanner):
    """Writes every matrix in two parts, cut between columns: rows then lie in two places each."""

    @override
    def create_local_plan(self) -> SavePlan:
        self.plan = replace(
            super().create_local_plan(),
            items=[part for fqn, tensor in self.state_dict.items() for part in _parts(fqn, tensor)],
        )
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole = self.state_dict[write_item.index.fqn]
        part: torch.Tensor = whole[:, chunk.offsets[1] : chunk.offsets[1] + chunk.sizes[1]].contiguous()
        return part


def _parts(fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
    n_rows, n_columns = tensor.shape
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size((0, start))),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    offsets=torch.Size((0, start)), sizes=torch.Size((n_rows, end - start))
                ),
                properties=TensorProperties(dtype=tensor.dtype),
                size=tensor.size(),
            ),
        )
        for start, end in ((0, n_columns // 3), (n_columns // 3, n_columns))
    ]


def make(folder: Path, file_bytes: int, largest_bytes: int) -> None:
    from safetensors.torch import save_file

    n_rows = largest_bytes // 4096
    # Of one piece of memory each in the files, but not here.
    one = torch.arange(largest_bytes // 4, dtype=torch.float32).reshape(n_rows, 1024)
    state: dict[str, Any] = {f"layer{index}": one + index for index in range(file_bytes // largest_bytes)}
    torch.save(state, folder / "made.pt")
    save_file(state, folder / "made.safetensors")
    commit(folder / "root", state)
    for name, planner in (("made", SPMDSavePlanner()), ("made-in-parts", InColumns())):
        save(
            state,
            storage_writer=FileSystemWriter(folder / name, sync_files=False),
            planner=planner,
            no_dist=True,
        )


def commit(root: Path, state: dict[str, torch.Tensor]) -> None:
    """A root with one commit: two ranks have written a half of the columns each."""
    store = open_store(root.as_uri())
    log = Log(store)
    claim = log.begin(pod_identity(), host="host")
    manifests = []
    for rank in range(2):
        halves = {fqn: tensor.chunk(2, dim=1)[rank].contiguous() for fqn, tensor in state.items()}
        data = bytearray(b"".join(half.numpy().tobytes() for half in halves.values()))
        starts = accumulate((half.nbytes for half in halves.values()), initial=0)
        order = SaveOrder(
            rank=rank,
            world_size=2,
            step=1,
            claim=claim.slot,
            nonce="0" * 32,
            structure=Structure.build(
                [
                    TensorOrder(
                        fqn=fqn,
                        dtype="float32",
                        global_shape=tuple(state[fqn].shape),
                        offsets=(0, rank * half.shape[1]),
                        sizes=tuple(half.shape),
                        start=start,
                    )
                    for (fqn, half), start in zip(halves.items(), starts, strict=False)
                ]
            ),
            values=(),
        )
        manifests.append(write_checkpoint(store, order, memoryview(data)))
    finished = finish_checkpoint(store, manifests[0], [manifests[1].make_ref()])
    log.commit(
        claim, step=1, folder=manifests[0].folder, size_bytes=finished.size_bytes, manifest=finished.manifest
    )


def committed(root: Path) -> CommitFiles:
    store = open_store(root.as_uri())
    record = Log(store).open().latest
    assert record is not None
    return CommitFiles(store, record)


def main() -> None:
    call, src, dst = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if call == "make":
        make(src, int(dst), int(sys.argv[4]))
        return
    with AnonymousMemory() as memory:
        if src.name == "root":
            with committed(src) as files:
                getattr(formats, call)(files, dst)
        else:
            getattr(formats, call)(src, dst)
    print(memory.grown_bytes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
