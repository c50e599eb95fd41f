"""Planning as every rank does it: layouts in, this rank's share out, with validation and the fingerprint."""

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving.assignment import assign, plan_save
from stepkeeper_planners.saving.fingerprints import digest_names, fingerprint
from stepkeeper_planners.saving.global_metadata import build_tensor_metadata

HYBRID_SHARDS = 64
"""In how many parts a tensor is cut that is sharded within a group of ranks, and held by every group."""


def sharded_state(n_chunks: int, world_size: int) -> list[TensorLayout]:
    """Lay out a state of fully sharded data parallel: each tensor in as many parts as there are ranks."""
    return _sharded(n_chunks, world_size, world_size)


def hybrid_state(n_chunks: int, world_size: int) -> list[TensorLayout]:
    """Lay out a state of hybrid sharded data parallel: each tensor in parts, each part on one rank of every replica."""
    return _sharded(n_chunks, world_size, min(HYBRID_SHARDS, world_size))


def _sharded(n_chunks: int, world_size: int, n_shards: int) -> list[TensorLayout]:
    replicas = world_size // n_shards
    owners = [
        tuple(Owner(rank=replica * n_shards + shard, local_index=0) for replica in range(replicas))
        for shard in range(n_shards)
    ]
    layouts = []
    for number in range(max(1, n_chunks // n_shards)):
        rows = n_shards * (1 + number % 7)
        part = rows // n_shards
        chunks = tuple(
            Chunk(box=Box(offsets=(shard * part, 0), sizes=(part, 512)), owners=owners[shard])
            for shard in range(n_shards)
        )
        name = f"layers.{number}.weight"
        layouts.append(TensorLayout(fqn=name, dtype="bfloat16", global_shape=(rows, 512), chunks=chunks))
    return layouts


def replicated_state(n_chunks: int, world_size: int) -> list[TensorLayout]:
    """Lay out a state of data parallel: every rank holds every tensor. One is as large as half of all others."""
    ranks = Ranks(rank=0, world_size=world_size)
    layouts = [
        whole_tensor(f"layers.{n}.weight", "float32", (64 + n % 7, 1000), ranks) for n in range(n_chunks)
    ]
    return [*layouts, whole_tensor("embedding", "float32", (32 * n_chunks, 1000), ranks)]


def spiral_state(n_chunks: int, world_size: int) -> list[TensorLayout]:
    """Lay out one tensor in rings of four chunks, each ring turning: no straight line parts one from the rest."""
    n_rings = max(1, n_chunks // 4)
    side = 2 * n_rings + 1
    spans = [((n_rings, 1), (n_rings, 1))]
    for low in range(n_rings):
        length, high = side - 2 * low - 1, side - low - 1
        spans += [((low, 1), (low, length)), ((low, length), (high, 1))]
        spans += [((high, 1), (low + 1, length)), ((low + 1, length), (low, 1))]
    counts = dict.fromkeys(range(world_size), 0)
    chunks = []
    for number, ((row, height), (column, width)) in enumerate(spans):
        rank = number * world_size // len(spans)
        box = Box(offsets=(row, column), sizes=(height, width))
        chunks.append(Chunk(box=box, owners=(Owner(rank=rank, local_index=counts[rank]),)))
        counts[rank] += 1
    return [TensorLayout(fqn="embedding", dtype="int8", global_shape=(side, side), chunks=tuple(chunks))]


def plan_one_rank(layouts: list[TensorLayout], rank: int, world_size: int) -> int:
    """Plan the save in one rank, and return the number of pieces that it writes."""
    fingerprint(digest_names(layouts))
    return len(plan_save(layouts, {}, Ranks(rank=rank, world_size=world_size)).tensors)


def plan_coordinator(layouts: list[TensorLayout], world_size: int) -> int:
    """Plan the coordinator's part, the metadata of all ranks included, and return the number of chunks in it."""
    fingerprint(digest_names(layouts))
    assignment = assign(layouts, world_size)
    boxes = assignment.list_boxes()
    return sum(len(build_tensor_metadata(layout, boxes[layout.fqn]).chunks) for layout in layouts)
