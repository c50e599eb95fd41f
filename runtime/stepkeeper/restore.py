"""Restoring: the ranks agree on a commit, each reads what it needs of it, every block verified as it is read."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from stepkeeper.checkpoint import CheckpointReader, read_manifests
from stepkeeper.companion.client import error_from, error_to
from stepkeeper.companion.messages import Begun, Kind, Quarantine, Restored
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.dcp.metadata import merge_tensors, merge_values
from stepkeeper.errors import RestoreError, TornCheckpointError
from stepkeeper.gang import Gang
from stepkeeper.log import CommitRecord, Log
from stepkeeper.manifest import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper.results import CheckpointInfo, RestoreResult, TensorInfo
from stepkeeper.snapshot import run_pending
from stepkeeper.storage import Store
from stepkeeper_planners import adapters
from stepkeeper_planners.asking import wanted_of
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.layout import Ranks, TensorLayout
from stepkeeper_planners.matching import StateReads, Stored, Wanted, plan_load
from stepkeeper_planners.reshard import PieceRead, StoredTensor
from stepkeeper_planners.state import gather_state, scatter_state
from stepkeeper_planners.values import decode_value

__all__ = ["Restorer", "load_commit"]

_log: Final = logging.getLogger(__name__)
_READ_AHEAD: Final = 8
"""Tensors that are being read while one is filled: bounds host memory."""

_TIMEOUT_S: Final = 3600.0


class Restorer:
    """Restores for one rank, together with the others."""

    def __init__(self, store: Store, companion: Companion, gang: Gang) -> None:
        self._store = store
        self._companion = companion
        self._gang = gang
        self._number = 0

    def latest(self, state: Mapping[str, object], take_over: str | None = None) -> CommitRecord | None:
        """`state` is what HEAD's commit holds, or its parent's if HEAD's was torn; None if the root holds none.

        Raises:
            FencedError: the root is another's.
            RestoreError: a commit was meant to be found and can't be used.
            LoadMismatchError: the state asks for other things than the commit holds.

        """
        base = self._agree(partial(self._companion.latest, take_over=take_over))
        condemned: CommitRecord | None = None
        while base is not None:
            torn = self._load(base, state)
            if torn is None:
                self._agree(partial(self._note_restored, base))
                return base
            if condemned is not None:
                raise RestoreError(
                    f"two commits were read bad in one start: step {condemned.step} and step {base.step} ({torn}). "
                    "More likely this node or its way to the store is broken than both of them; nothing more was "
                    "condemned"
                )
            condemned = base
            _log.error("the commit of step %d is torn, its parent is loaded instead: %s", base.step, torn)
            base = self._agree(partial(self._quarantine, base, torn))
        if condemned is not None:
            raise RestoreError(
                f"the commit of step {condemned.step} was read bad, and there is none before it"
            )
        return None

    def step(self, step: int, state: Mapping[str, object]) -> CommitRecord:
        """`state` is what the newest commit of `step` on HEAD's line holds. Nothing is appended to the log.

        Raises:
            RestoreError: there is no such commit.
            TornCheckpointError: bytes of it are bad.

        """
        record = self._agree(partial(self.find, step))
        assert record is not None
        torn = self._load(record, state)
        if torn is not None:
            raise TornCheckpointError(torn)
        return record

    def find(self, step: int) -> CommitRecord:
        """The newest commit of `step` on HEAD's line. Raises RestoreError, listing the steps that there are."""
        line = Log(self._store).open().line
        record = next((record for record in line if record.step == step), None)
        if record is None:
            steps = ", ".join(str(record.step) for record in reversed(line)) or "none"
            raise RestoreError(f"{self._store.uri} has no commit of step {step}; its steps: {steps}")
        return record

    def steps(self) -> list[int]:
        """The steps of HEAD's line."""
        return sorted({record.step for record in Log(self._store).open().line})

    def describe(self, step: int) -> CheckpointInfo:
        """What the commit of `step` holds, from its manifests. Raises RestoreError, TornCheckpointError."""
        record = self.find(step)
        manifests = read_manifests(self._store, record)
        return CheckpointInfo(
            sequence=record.slot,
            step=record.step,
            uri=self._uri(record),
            size_bytes=record.size_bytes,
            tensors={
                fqn: TensorInfo(dtype=tensor.dtype, shape=tensor.global_shape)
                for fqn, tensor in merge_tensors(manifests).items()
            },
            values=tuple(merge_values(manifests)),
        )

    def result(self, record: CommitRecord) -> RestoreResult:
        """What a caller is told of a restored commit."""
        return RestoreResult(sequence=record.slot, step=record.step, uri=self._uri(record))

    def _uri(self, record: CommitRecord) -> str:
        return f"{self._store.uri.rstrip('/')}/{record.folder}"

    def _load(self, record: CommitRecord, state: Mapping[str, object]) -> str | None:
        """None if all ranks have loaded it, else why bytes of it are bad. Whatever else goes wrong is raised."""
        failure: Exception | None = None
        verdict: dict[str, Any] = {}
        try:
            load_commit(
                self._store, record, state, Ranks(rank=self._gang.rank, world_size=self._gang.world_size)
            )
        except TornCheckpointError as error:
            verdict = {"torn": str(error)}
        except Exception as error:  # raised below, once the others have been told
            failure = error
            verdict = {"error": error_to(error)}
        name = self._name()
        verdicts = self._gang.gather(f"{name}/verdict", verdict, _TIMEOUT_S)
        worst: dict[str, Any] = {}
        for each in verdicts:
            worst = each if "error" in each or not worst else worst
        worst = self._gang.broadcast(f"{name}/worst", worst, _TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in worst:
            raise error_from(worst["error"])
        return None if "torn" not in worst else str(worst["torn"])

    def _quarantine(self, commit: CommitRecord, reason: str) -> CommitRecord | None:
        body = Quarantine(commit=commit.slot, reason=reason)
        return decode(Begun, self._companion.process().ask(Kind.QUARANTINE, encode(body))).base

    def _note_restored(self, commit: CommitRecord) -> CommitRecord | None:
        self._companion.process().ask(Kind.RESTORED, encode(Restored(commit=commit.slot)))
        return commit

    def _agree(self, choose: Callable[[], CommitRecord | None]) -> CommitRecord | None:
        """What rank 0 chooses, after all ranks have met: it writes nothing before they are all there."""
        name = self._name()
        self._gang.gather(f"{name}/met", {}, _TIMEOUT_S)
        choice: dict[str, Any] | None = None
        failure: Exception | None = None
        if self._gang.rank == 0:
            try:
                commit = choose()
                choice = {} if commit is None else {"commit": encode(commit)}
            except Exception as error:  # raised below, once the others have been told
                failure = error
                choice = {"error": error_to(error)}
        choice = self._gang.broadcast(f"{name}/choice", choice, _TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in choice:
            raise error_from(choice["error"])
        return decode(CommitRecord, choice["commit"]) if "commit" in choice else None

    def _name(self) -> str:
        self._number += 1
        return f"restore/{self._number}"


def load_commit(store: Store, record: CommitRecord, state: Mapping[str, object], ranks: Ranks) -> None:
    """This rank's part of `state` is what the commit holds, tensors in place, Statefuls by load_state_dict().

    Raises:
        TornCheckpointError: bytes of the commit are bad. The state is part old, part new then.
        LoadMismatchError: names, shapes or dtypes differ; nothing was changed.
        StorageError: the store gave no answer, or refused.

    """
    manifests = read_manifests(store, record)
    reader = CheckpointReader(store, manifests)
    tensors, values = merge_tensors(manifests), merge_values(manifests)
    flat = gather_state(state)
    wanted = wanted_of(flat, ranks)
    stored = Stored(tensors={fqn: _stored(tensor) for fqn, tensor in tensors.items()}, values=tuple(values))
    reads = plan_load(wanted, stored, ranks)
    for load, shards in _read_ahead(reader, _loads(wanted, reads, tensors, ranks.rank)):
        adapters.fill(flat.tensors[load.layout.fqn], shards)
    names = dict.fromkeys(name for read in reads.values for name in read.stored_names)
    read_values = {name: _read_value(reader, name, values[name]) for name in names}
    loaded = {
        read.fqn: read.value_from(read_values, flat.resizers.get(read.fqn), ranks) for read in reads.values
    }
    scatter_state(state, flat, loaded)
    run_pending(flat.tensors)


def _read_value(reader: CheckpointReader, name: str, value: ValueRecord) -> object:
    return decode_value(name, reader.read_verified(value.path, value.offset_bytes, value.length_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One tensor of this rank."""

    layout: TensorLayout
    boxes: dict[int, Box]
    pieces: tuple[PieceRead, ...]
    stored: TensorRecord


def _stored(tensor: TensorRecord) -> StoredTensor:
    boxes = tuple(Box(offsets=chunk.offsets, sizes=chunk.sizes) for chunk in tensor.chunks)
    return StoredTensor(
        dtype=tensor.dtype, global_shape=tensor.global_shape, boxes=boxes, data=tuple(tensor.chunks)
    )


def _loads(
    wanted: Wanted, reads: StateReads, tensors: Mapping[str, TensorRecord], rank: int
) -> Iterator[_Load]:
    by_fqn: dict[str, list[PieceRead]] = {}
    for piece in reads.pieces:
        by_fqn.setdefault(piece.fqn, []).append(piece)
    for layout in wanted.layouts:
        pieces = by_fqn.get(layout.fqn)
        if pieces:
            stored = tensors[pieces[0].stored_fqn]
            yield _Load(layout=layout, boxes=layout.local_boxes(rank), pieces=tuple(pieces), stored=stored)


def _read_ahead(
    reader: CheckpointReader, loads: Iterator[_Load]
) -> Iterator[tuple[_Load, dict[int, torch.Tensor]]]:
    """Each tensor's local shards, read by several threads, a bounded number ahead of who takes them."""
    waiting: deque[tuple[_Load, Future[dict[int, torch.Tensor]]]] = deque()
    with ThreadPoolExecutor(max_workers=_READ_AHEAD, thread_name_prefix="restore") as threads:
        for load in loads:
            waiting.append((load, threads.submit(_read_shards, reader, load)))
            if len(waiting) > _READ_AHEAD:
                first, shards = waiting.popleft()
                yield first, shards.result()
        while waiting:
            first, shards = waiting.popleft()
            yield first, shards.result()


def _read_shards(reader: CheckpointReader, load: _Load) -> dict[int, torch.Tensor]:
    dtype = dtype_of(load.layout.dtype)
    shards = {index: torch.empty(box.sizes, dtype=dtype) for index, box in load.boxes.items()}
    for piece in load.pieces:
        chunk = load.stored.chunks[piece.stored_index]
        source = _read_rows(reader, chunk, piece, dtype)
        target = shards[piece.local_index]
        within = piece.wanted_box.shifted(load.boxes[piece.local_index].offsets)
        target[within.slices].copy_(source)
    return shards


def _read_rows(
    reader: CheckpointReader, chunk: ChunkRecord, piece: PieceRead, dtype: torch.dtype
) -> torch.Tensor:
    """The wanted box, cut from the rows of the stored chunk that hold it: one contiguous read."""
    wanted = piece.wanted_box.shifted(piece.stored_box.offsets)
    first, n_rows = (wanted.offsets[0], wanted.sizes[0]) if wanted.sizes else (0, 1)
    row_shape = chunk.sizes[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    start = chunk.offset_bytes + chunk.data_offset_bytes + first * row_bytes
    data = bytearray(reader.read_verified(chunk.path, start, n_rows * row_bytes))
    rows = torch.frombuffer(data, dtype=dtype)
    if not wanted.sizes:
        return rows.view(())
    return rows.view(n_rows, *row_shape)[(slice(None), *wanted.slices[1:])]
