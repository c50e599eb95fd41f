"""Compare the latest commits of two roots, bit for bit and by name. Needs torch."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_planners.formats.checkpoint_reader import CheckpointReader, open_checkpoint

__all__ = ["StateComparison", "compare_latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The comparison of the latest commits of two roots."""

    steps: tuple[int | None, int | None]
    """The step of each; None: the root has no commit."""

    n_equal: int = 0
    """The number of tensors and values that are equal."""

    differing: tuple[str, ...] = ()
    """The flat names of those that differ, or that only one has, in the order of the first root's state."""

    has_random_state: bool = False
    """True if the state has a RandomState."""


def compare_latest(uri: str, other_uri: str) -> StateComparison:
    """Compare the latest commits of two roots. Raises StepkeeperError and PlannerError if one can't be read."""
    stores = [open_store(each) for each in (uri, other_uri)]
    latest = [Log(store).open().latest for store in stores]
    first, second = latest
    if first is None or second is None:
        return StateComparison(
            steps=(None if first is None else first.step, None if second is None else second.step)
        )
    with ExitStack() as stack:
        readers = [
            open_checkpoint(stack.enter_context(CommitFiles(store, record)))
            for store, record in zip(stores, (first, second), strict=True)
        ]
        names = list(dict.fromkeys(name for each in readers for name in (*each.tensors, *each.values)))
        differing = tuple(name for name in names if not _is_equal(name, *readers))
    return StateComparison(
        steps=(first.step, second.step),
        n_equal=len(names) - len(differing),
        differing=differing,
        has_random_state=any(".generators." in f".{name}." for name in names),
    )


def _is_equal(name: str, one: CheckpointReader, other: CheckpointReader) -> bool:
    if (mine := one.tensors.get(name)) is not None:
        theirs = other.tensors.get(name)
        if theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
    elif name not in one.values or name not in other.values:
        return False
    return all(a == b for a, b in zip(_read(name, one), _read(name, other), strict=True))


def _read(name: str, reader: CheckpointReader) -> Iterator[bytes | memoryview]:
    """Read the bytes of a tensor's elements, in pieces of the same sizes for equal tensors, or those of a value."""
    if name in reader.tensors:
        yield from reader.read_elements(name)
        return
    path, offset_bytes, n_bytes = reader.values[name]
    with reader.files.open(path) as file:
        file.seek(offset_bytes)
        yield file.read(n_bytes)
