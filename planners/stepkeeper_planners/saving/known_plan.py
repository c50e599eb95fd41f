"""A plan known again in another process: from what its rank wrote by it, without anything divided anew. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import LARGE_VALUE_BYTES, SavePlan, TensorWrite
from stepkeeper_planners.saving.fingerprints import fingerprint, form_digests
from stepkeeper_planners.saving.rules import planning_rules

__all__ = ["Structure", "WrittenShare", "known_plan", "plan_digest"]

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare:
    """What a rank wrote of a save, and by which plan."""

    digest: str
    """`plan_digest` of that plan."""

    boxes: Mapping[str, Sequence[Box]]
    """Of each tensor, in the order in which they were written. One box of the plan may have been cut into several."""

    values: Sequence[str]
    """And others that no plan divides."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """All that a plan depends on."""

    layouts: tuple[TensorLayout, ...]
    value_bytes: Mapping[str, int]
    ranks: Ranks

    @cached_property
    def forms(self) -> dict[str, bytes]:
        """Digests of the layouts."""
        return form_digests(self.layouts)


def plan_digest(structure: Structure, plan: SavePlan) -> str | None:
    """Equal for equal plans of states that are built alike, made by the same rules for the same rank, in any process.

    None where a layout isn't complete: its digest says nothing of where its chunks are.
    """
    if not all(layout.complete for layout in structure.layouts):
        return None
    ranks, sizes = structure.ranks, structure.value_bytes
    digest = blake2b(planning_rules(ranks.world_size).encode(), digest_size=_DIGEST_BYTES)
    weights = sorted((name, size if size >= LARGE_VALUE_BYTES else 0) for name, size in sizes.items())
    digest.update(fingerprint(structure.forms) + repr((ranks.rank, weights, plan.values)).encode())
    for write in plan.tensors:
        digest.update(repr((write.fqn, write.local_index, write.box.offsets, write.box.sizes)).encode())
    return digest.hexdigest()


def known_plan(structure: Structure, written: WrittenShare) -> SavePlan | None:
    """What `plan_save` makes of this structure, if the share was written by that plan; else None.

    The layouts were validated when the plan was made.
    """
    by_name = {layout.fqn: layout for layout in structure.layouts}
    writes: list[TensorWrite] = []
    for fqn, boxes in written.boxes.items():
        layout = by_name.get(fqn)
        if layout is None or any(len(box.sizes) != len(layout.global_shape) for box in boxes):
            return None
        writes += _writes(layout, layout.local_boxes(structure.ranks.rank), boxes)
    plan = SavePlan(
        tensors=tuple(sorted(writes, key=lambda write: (write.fqn, write.box))),
        values=tuple(sorted(name for name in written.values if name in structure.value_bytes)),
    )
    return plan if plan_digest(structure, plan) == written.digest else None


def _writes(layout: TensorLayout, shards: Mapping[int, Box], boxes: Iterable[Box]) -> Iterator[TensorWrite]:
    """The boxes as they were before a shard's were cut. A box that lies in no shard is left out."""
    by_shard: dict[int, list[Box]] = {}
    for box in boxes:
        index = next((index for index, shard in shards.items() if shard.contains(box)), None)
        if index is not None:
            _join(by_shard.setdefault(index, []), box)
    for index, joined in by_shard.items():
        for box in joined:
            yield TensorWrite(
                fqn=layout.fqn,
                dtype=layout.dtype,
                global_shape=layout.global_shape,
                box=box,
                local_index=index,
                shard_box=box.relative_to(shards[index].offsets),
            )


def _join(boxes: list[Box], box: Box) -> None:
    """`box` is behind the others; or it, and those that become one with it, are one."""
    while boxes:
        joined = _joined(boxes[-1], box)
        if joined is None:
            break
        box = joined
        boxes.pop()
    boxes.append(box)


def _joined(first: Box, second: Box) -> Box | None:
    """Both as one box, if the second goes on where the first ends, and they differ in nothing else."""
    differing = [
        axis
        for axis, sides in enumerate(zip(first.offsets, second.offsets, strict=True))
        if sides[0] != sides[1] or first.sizes[axis] != second.sizes[axis]
    ]
    if len(differing) != 1 or first.ends[differing[0]] != second.offsets[differing[0]]:
        return None
    axis = differing[0]
    sizes = list(first.sizes)
    sizes[axis] += second.sizes[axis]
    return Box(offsets=first.offsets, sizes=tuple(sizes))
