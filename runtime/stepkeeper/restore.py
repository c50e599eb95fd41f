"""Restoring: the ranks agree on a commit, each reads what it needs of it, every block verified as it is read."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from stepkeeper.fitting import error_said, findings_said, first_error, raised_from, said_findings
from stepkeeper.gang import Gang
from stepkeeper.log import CommitRecord, Log
from stepkeeper.manifest import ChunkRecord, Manifest, TensorRecord, ValueRecord
from stepkeeper.results import CheckpointInfo, RestoreResult, TensorInfo
from stepkeeper.snapshot import run_pending
from stepkeeper.storage import Store
from stepkeeper_planners import adapters
from stepkeeper_planners.asking import wanted_of
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.differences import Findings, mismatch, unexpected_everywhere
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.layout import Ranks, TensorLayout
from stepkeeper_planners.matching import StateReads, Stored, Wanted, compare
from stepkeeper_planners.reshard import PieceRead, StoredTensor
from stepkeeper_planners.state import FlatState, gather_state, scatter_state
from stepkeeper_planners.values import decode_value

__all__ = ["Loading", "Restorer"]

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
        """None if all ranks have loaded it, else why bytes of it are bad. Whatever else goes wrong is raised.

        No rank changes anything of its state before all have said that theirs fits.

        """
        name = self._name()
        loading = Loading(self._store, record, state, self._gang.ranks)
        torn = self._together(
            f"{name}/fit", loading.compare, partial(_agreed_mismatch, loading, self._uri(record))
        )
        return self._together(f"{name}/filled", loading.fill) if torn is None else torn

    def _together(
        self,
        name: str,
        act: Callable[[], dict[str, Any]],
        judge: Callable[[Sequence[dict[str, Any]]], Exception | None] = lambda _: None,
    ) -> str | None:
        """All ranks have acted, and none failed; else why bytes are bad.

        What the ranks say of it is for rank 0 to judge: the error is raised in all of them.

        """
        failure: Exception | None = None
        try:
            said = act()
        except TornCheckpointError as error:
            said = {"torn": str(error)}
        except Exception as error:  # raised below, once the others have been told
            failure = error
            said = {"error": error_said(error, self._gang.rank)}
        by_rank = self._gang.gather(name, said, _TIMEOUT_S)
        worst = first_error(by_rank)
        if by_rank and worst is None and (judged := judge(by_rank)) is not None:
            worst = error_said(judged, self._gang.rank)
        torn = next((each["torn"] for each in by_rank if "torn" in each), None)
        # An error comes first: what is no fault of the commit's condemns none.
        answer = {"error": worst} if worst is not None else {} if torn is None else {"torn": torn}
        answer = self._gang.broadcast(f"{name}/worst", answer, _TIMEOUT_S)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise raised_from(answer["error"])
        return None if "torn" not in answer else str(answer["torn"])

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


class Loading:
    """One commit on its way into one rank's state: first `compare`, then, when all ranks have, `fill`."""

    def __init__(self, store: Store, record: CommitRecord, state: Mapping[str, object], ranks: Ranks) -> None:
        self._store, self._record, self._state, self._ranks = store, record, state, ranks
        self._flat = FlatState(tensors={}, values={})
        self._wanted = Wanted(layouts=())
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._manifests: Sequence[Manifest] = ()
        self._tensors: Mapping[str, TensorRecord] = {}
        self._values: Mapping[str, ValueRecord] = {}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """What the commit holds; known once it was compared."""
        return (*self._tensors, *self._values)

    def compare(self) -> dict[str, Any]:
        """What to read is known, and what this rank has to say about where its state doesn't fit. Nothing is changed.

        Raises:
            TornCheckpointError: bytes of the commit's manifests are bad.
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
            StorageError: the store gave no answer, or refused.

        """
        self._manifests = read_manifests(self._store, self._record)
        self._tensors, self._values = merge_tensors(self._manifests), merge_values(self._manifests)
        self._flat = gather_state(self._state)
        self._wanted = wanted_of(self._flat, self._ranks)
        stored = {fqn: _stored(tensor) for fqn, tensor in self._tensors.items()}
        self._reads, differences = compare(
            self._wanted, Stored(tensors=stored, values=tuple(self._values)), self._ranks
        )
        if not differences:
            return {}
        findings = Findings.of(differences, self.stored_names, short=self._ranks.rank != 0)
        return {"findings": findings_said(findings)}

    def fill(self) -> dict[str, Any]:
        """This rank's part of the state is what the commit holds, tensors in place, Statefuls by load_state_dict().

        Raises:
            TornCheckpointError: bytes of the commit are bad. The state is part old, part new then.
            StorageError: the store gave no answer, or refused.

        """
        flat, reads = self._flat, self._reads
        reader = CheckpointReader(self._store, self._manifests)
        loads = _loads(self._wanted, reads, self._tensors, self._ranks.rank)
        for load, shards in _read_ahead(reader, loads):
            adapters.fill(flat.tensors[load.layout.fqn], shards)
        names = dict.fromkeys(name for read in reads.values for name in read.stored_names)
        read_values = {name: _read_value(reader, name, self._values[name]) for name in names}
        loaded = {
            read.fqn: read.value_from(read_values, flat.resizers.get(read.fqn), self._ranks)
            for read in reads.values
        }
        scatter_state(self._state, flat, loaded)
        run_pending(flat.tensors)
        return {}


def _agreed_mismatch(loading: Loading, uri: str, said: Sequence[dict[str, Any]]) -> Exception | None:
    """One report of where the ranks' states don't fit; names that only some ranks ask for are no reason."""
    found = [said_findings(each["findings"]) if "findings" in each else None for each in said]
    differences = unexpected_everywhere(found, loading.stored_names)
    partly = (
        "CheckpointManager restores a state as a whole. A part of this commit, or other dtypes: load it with "
        f"torch.distributed.checkpoint from {uri}, with SPMDLoadPlanner's strict, items, exclude and cast."
    )
    return mismatch(differences, partly) if any(differences) else None


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
