"""Check that boxes cover a tensor: each element is in exactly one of them. Pure."""

from collections.abc import Iterable, Sequence

from stepkeeper_planners.errors import LayoutError, format_ranks
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Owner, TensorLayout
from stepkeeper_planners.geometry.overlapping_pair import find_overlap

__all__ = ["check_cover", "check_disjoint", "check_layout"]

_Owners = Sequence[Sequence[Owner]]
"""The copies of each box, for messages; empty if unknown."""


def check_layout(layout: TensorLayout) -> None:
    """Check that the chunks cover the tensor, as `check_cover`. LayoutError names the ranks that hold them too."""
    chunks = layout.chunks
    if len(chunks) == 1 and chunks[0].box == Box.whole(layout.global_shape):
        # Most tensors are whole on each of many ranks: their owners need not be checked.
        return
    boxes, owners = [chunk.box for chunk in chunks], [chunk.owners for chunk in chunks]
    check_cover(layout.fqn, layout.global_shape, boxes, owners)


def check_cover(fqn: str, global_shape: tuple[int, ...], boxes: Sequence[Box], owners: _Owners = ()) -> None:
    """Check that the boxes are inside the tensor, are disjoint, and leave no element out.

    Raises LayoutError. It names the tensor `fqn`, and wrong boxes with their ranks or the number of lacking elements.
    """
    whole = Box.whole(global_shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return
    for number, box in enumerate(boxes):
        if len(box.offsets) != len(global_shape) or not whole.contains(box):
            raise LayoutError(
                f"{fqn}: {_describe_chunk(number, boxes, owners)} is not inside the shape {global_shape}"
            )
    check_disjoint(fqn, boxes, owners)
    covered = sum(box.volume for box in boxes)
    if covered != whole.volume:
        ranks = _list_ranks(owner for each in owners for owner in each)
        held = f", of {format_ranks(ranks)}," if owners else ""
        raise LayoutError(
            f"{fqn}: the chunks{held} hold {covered} of {whole.volume} elements of shape {global_shape}"
        )


def check_disjoint(fqn: str, boxes: Sequence[Box], owners: _Owners = ()) -> None:
    """Check that no two boxes have an element in common. Raises LayoutError, which names both."""
    if len(boxes) > 1 and not boxes[0].offsets:
        raise LayoutError(f"{fqn}: a 0-dim tensor has one chunk, got {len(boxes)}")
    found = find_overlap(boxes)
    if found is not None:
        one, other = (_describe_chunk(number, boxes, owners) for number in found)
        raise LayoutError(f"{fqn}: {one} and {other} overlap")


def _describe_chunk(number: int, boxes: Sequence[Box], owners: _Owners) -> str:
    held = f" (on {format_ranks(_list_ranks(owners[number]))})" if owners else ""
    return f"chunk {boxes[number]}{held}"


def _list_ranks(owners: Iterable[Owner]) -> list[int]:
    return sorted({owner.rank for owner in owners})
