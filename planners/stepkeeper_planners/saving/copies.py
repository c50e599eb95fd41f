"""Digest the copies that several ranks hold of one chunk, so that ranks can compare them before one of them is written.

A digest reads each element from memory once, and makes no copy that leaves the processor's cache.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, groupby
from typing import Final, NamedTuple, TypeVar

import torch
from torch._C._nn import flatten_dense_tensors
from xxhash import xxh3_128

from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.state.tree import order_tensors, pick_at

__all__ = ["CopyDigests", "HeldCopies", "find_copies", "sample_copy"]

T = TypeVar("T")
Ranks = tuple[int, ...]
_Chunk = tuple[TensorLayout, int, int]
"""A chunk's tensor, its local index on this rank, and its number of elements."""

_SMALL_BYTES: Final = 128 * 1024
"""The size below which chunks are joined: a call for each would take longer."""

_JOINED_BYTES: Final = 512 * 1024
"""The most that is joined: it stays in the cache, and takes the same memory again and again."""

_LEAST_BYTES: Final = 512
"""What the smallest chunk counts as."""

_TASK_BYTES: Final = 4 * 1024 * 1024
"""The most of one chunk that a thread reads in one go. Fewer bytes aren't worth another thread."""

_MOST_THREADS: Final = 8
_N_SAMPLED: Final = 16
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR: Final = 0x2545F4914F6CDD1D
_WITHOUT_NUMBERS: Final = {getattr(torch, "float4_e2m1fn_x2", None)}
"""Dtypes whose elements torch can't convert: their bytes are sampled."""


class _Task(NamedTuple):
    """A part of the reading, for one thread: elements of one chunk, or several small chunks of one dtype."""

    pick: Callable[
        [Sequence[torch.Tensor]], Sequence[torch.Tensor]
    ]  # from all tensors of the state, in order
    indexes: tuple[int, ...]  # each chunk's local index
    elements: slice | None  # of one chunk; None: all elements of all chunks
    n_bytes: int
    is_ordinary: bool
    is_on_host: bool
    join: Callable[..., torch.Tensor]  # the fastest function that joins them in order


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopies:
    """The chunks that this rank and the same other ranks hold."""

    key: str
    """A digest of all ranks that hold them: their list may be long, and each rank sends the key with each save."""

    chunks: tuple[_Chunk, ...]
    """Those that this rank reads itself."""

    tasks: tuple[_Task, ...]
    """How this rank reads them. Those of the other ranks differ in local indexes only."""

    on_devices: tuple[str, ...]
    """The names of the others, which XLA devices digest, sorted."""


def find_copies(
    layouts: Sequence[TensorLayout], rank: int, tensors: Mapping[str, torch.Tensor]
) -> tuple[HeldCopies, ...]:
    """Find the chunks of which this rank and others hold copies, by the ranks that hold them.

    What several processes compute in one XLA program is left out: it is one array by XLA's rules.
    """
    on_devices = {name for name, tensor in tensors.items() if tensor.device.type == "xla"}
    left_out = on_devices if on_devices and adapters.is_one_program() else set()
    known: dict[int, tuple[Ranks, int]] = {}
    found: dict[Ranks, list[_Chunk]] = {}
    for layout in (each for each in layouts if each.fqn not in left_out):
        for chunk in layout.chunks:
            holders = known.get(id(chunk.owners))
            if holders is None:
                own = [owner.local_index for owner in chunk.owners if owner.rank == rank]
                ranks = tuple(sorted({owner.rank for owner in chunk.owners})) if own else ()
                holders = known[id(chunk.owners)] = ranks, min(own, default=0)
            if len(holders[0]) > 1 and (size := math.prod(chunk.box.sizes)):
                found.setdefault(holders[0], []).append((layout, holders[1], size))
    held = []
    places = {name: index for index, name in enumerate(tensors)}
    for ranks, chunks in sorted(found.items(), key=lambda item: item[0]):
        names = {layout.fqn for layout, *_ in chunks} & on_devices
        mine = tuple(chunk for chunk in chunks if chunk[0].fqn not in names)
        tasks = tuple(_plan_tasks(mine, tensors, places))
        key = _hash([repr(ranks).encode()])
        held.append(HeldCopies(key=key, chunks=mine, tasks=tasks, on_devices=tuple(sorted(names))))
    return tuple(held)


def _plan_tasks(
    chunks: Sequence[_Chunk], tensors: Mapping[str, torch.Tensor], places: Mapping[str, int]
) -> Iterator[_Task]:
    """Plan how chunks are read. `places` has the place of each tensor among those of the state."""
    small: dict[str, list[_Chunk]] = {}
    # Those of one shape together: they are joined several times as fast as others.
    for chunk in sorted(chunks, key=lambda chunk: (chunk[0].global_shape, chunk[0].fqn)):
        layout, _, size = chunk
        width = itemsize_bytes(layout.dtype)
        if size * width < _SMALL_BYTES:
            small.setdefault(layout.dtype, []).append(chunk)
            continue
        step = _TASK_BYTES // width
        for start in range(0, size, step):
            yield _make_task([chunk], tensors, places, slice(start, min(start + step, size)))
    for alike in small.values():
        sizes = (max(_LEAST_BYTES, size * itemsize_bytes(layout.dtype)) for layout, _, size in alike)
        numbered = zip(alike, accumulate(sizes), strict=True)
        for _, joined in groupby(numbered, lambda each: each[1] // _JOINED_BYTES):
            yield _make_task([chunk for chunk, _ in joined], tensors, places)


def _make_task(
    chunks: Sequence[_Chunk],
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, int],
    elements: slice | None = None,
) -> _Task:
    names = [layout.fqn for layout, *_ in chunks if layout.fqn in tensors]
    size = sum(size for *_, size in chunks) if elements is None else elements.stop - elements.start
    held = [tensors[name] for name in names]
    is_ordinary = all(map(adapters.is_ordinary, held))
    join = flatten_dense_tensors
    if len(chunks) > 1 and is_ordinary and len({tensor.shape for tensor in held}) == 1:
        join = torch.stack
    elif len(chunks) > 1 and all(tensor.dim() == 1 for tensor in held):
        join = torch.cat
    return _Task(
        pick=pick_at([places[name] for name in names]),
        indexes=tuple(index for _, index, _ in chunks),
        elements=elements,
        n_bytes=size * itemsize_bytes(chunks[0][0].dtype),
        is_ordinary=is_ordinary,
        is_on_host=all(tensor.is_cpu for tensor in held),
        join=join,
    )


class CopyDigests:
    """The digests of the copies that one rank holds."""

    def __init__(self, copies: Sequence[HeldCopies]) -> None:
        """Read nothing yet."""
        self._copies: Final = copies
        self._tasks: Final = [task for each in copies for task in each.tasks]
        self._sums: Final[dict[int, bytes]] = {}
        self._names: Final = [name for each in copies for name in each.on_devices]
        self._await_devices: Callable[[], list[str]] = list
        self._on_devices: dict[str, str] = {}

    def start_on_devices(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start the digests that XLA devices make."""
        self._await_devices = adapters.digest_on_devices([tensors[name] for name in self._names])

    def await_devices(self) -> None:
        """Wait for the digests that XLA devices make."""
        self._on_devices = dict(zip(self._names, self._await_devices(), strict=True))

    def read(self, tensors: Mapping[str, torch.Tensor], meanwhile: Callable[[], T]) -> T:
        """Read the copies, and return the result of `meanwhile`, which changes none of them.

        Other threads read those on the host while this one runs `meanwhile`; then it reads too. XLA devices read
        theirs until `await_devices` returns. `tensors` has the names of `find_copies`, in the same order.
        """
        self.start_on_devices(tensors)
        ordered = order_tensors(tensors)
        self._read_all(ordered, deque(task for task in self._tasks if not task.is_on_host))
        left = deque(task for task in self._tasks if task.is_on_host)
        if not left:
            return meanwhile()
        n_threads = min(
            _MOST_THREADS,
            max(2, torch.get_num_threads()),
            len(os.sched_getaffinity(0)),
            1 + sum(task.n_bytes for task in left) // _TASK_BYTES,
        )
        with ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="stepkeeper-digest") as pool:
            others = [pool.submit(self._read_all, ordered, left) for _ in range(n_threads - 1)]
            try:
                result = meanwhile()
            except BaseException:
                left.clear()
                raise
            self._read_all(ordered, left)
            for other in others:
                other.result()
        return result

    def combine(self) -> dict[str, str]:
        """Return one digest in hex digits for each set of ranks that hold copies together, by its key.

        Those sets are left out of which the devices' digests have not come.
        """
        return {
            each.key: _hash(
                [self._sums[id(task)] for task in each.tasks]
                + [self._on_devices[name].encode() for name in each.on_devices]
            )
            for each in self._copies
            if self._on_devices.keys() >= {*each.on_devices}
        }

    def list_names(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the digest of each tensor of which the ranks of `key` hold copies. They are read again."""
        (each,) = (each for each in self._copies if each.key == key)
        found: dict[str, list[bytes]] = {}
        places, ordered = {name: index for index, name in enumerate(tensors)}, order_tensors(tensors)
        with torch.no_grad():
            for chunk in each.chunks:
                sums = [_digest(ordered, task) for task in _plan_tasks([chunk], tensors, places)]
                found.setdefault(chunk[0].fqn, []).extend(sums)
        digests = {name: _hash(sums) for name, sums in found.items()}
        return digests | {name: self._on_devices[name] for name in each.on_devices}

    def _read_all(self, tensors: Sequence[torch.Tensor], left: deque[_Task]) -> None:
        with torch.no_grad():  # a setting of each thread
            while True:
                try:
                    task = left.popleft()
                except IndexError:  # other threads read the rest
                    return
                self._sums[id(task)] = _digest(tensors, task)


def sample_copy(tensor: torch.Tensor) -> list[float]:
    """Return the norm of a tensor's elements on this rank, and some of them."""
    shard = _read_shard(tensor, 0).detach().resolve_conj().resolve_neg()
    numbers = (torch.view_as_real(shard) if shard.is_complex() else shard).reshape(-1)
    if numbers.dtype in _WITHOUT_NUMBERS:
        numbers = numbers.view(torch.uint8)
    some = [numbers[place * (numbers.numel() - 1) // (_N_SAMPLED - 1)].item() for place in range(_N_SAMPLED)]
    # In parts: as float64 the whole might take more memory than there is.
    parts = (part.to(torch.float64) for part in torch.split(numbers, _TASK_BYTES))
    return [math.hypot(*(torch.linalg.vector_norm(part).item() for part in parts)), *map(float, some)]


def _read_shard(tensor: torch.Tensor, index: int) -> torch.Tensor:
    if adapters.is_ordinary(tensor):
        return tensor
    own = adapters.local_memory(tensor)
    return adapters.local_shards(tensor)[index] if own is None else own


def _digest(tensors: Sequence[torch.Tensor], task: _Task) -> bytes:
    # Without a line of Python for each: there may be thousands, and training waits.
    shards = task.pick(tensors)
    if not task.is_ordinary:
        shards = list(map(_read_shard, shards, task.indexes))
    if task.elements is not None:
        shards = [_take(shards[0], task.elements)]
    elif not task.is_on_host:
        shards = [shard.cpu() for shard in shards]
    # Reshaped by torch's order of dimensions, not that in memory.
    flat = task.join(shards).resolve_conj().resolve_neg().reshape(-1)
    if not flat.is_cpu:
        return _sum_there(flat)
    digest = xxh3_128()
    digest.update(flat.view(torch.uint8).numpy().data)  # without the GIL
    return digest.digest()


def _take(shard: torch.Tensor, elements: slice) -> torch.Tensor:
    """Return some of a tensor's elements in order. Of one that isn't contiguous only a part is copied for that."""
    start, stop = elements.start, elements.stop
    while not shard.is_contiguous():
        inner = shard[0].numel()
        first, end = start // inner, -(-stop // inner)
        start, stop = start - first * inner, stop - first * inner
        shard = shard[first] if end - first == 1 else shard[first:end].contiguous()
    return shard.view(-1)[start:stop]


def _sum_there(flat: torch.Tensor) -> bytes:
    """Return the sum of an accelerator's elements, each mixed with its place: so 8 bytes are copied to the host."""
    words = flat.view(_WORDS[min(8, flat.itemsize)]).to(torch.int64)
    mixed = words + torch.arange(len(words), device=flat.device) * _FACTOR
    for shift in (32, 29, 32):  # as the end of MurmurHash3 does
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _FACTOR
    return mixed.sum().cpu().numpy().tobytes()


def _hash(parts: Sequence[bytes]) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()
