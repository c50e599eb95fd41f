"""Compare the latest commits of two roots, bit for bit and by name. Needs torch."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Final, cast

from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.supervise.rehearsal_rules import StateComparison
from stepkeeper_planners.formats.checkpoint_reader import CheckpointReader, open_checkpoint
from stepkeeper_planners.state.values import encode_value

__all__ = ["compare_latest"]

_GENERATORS: Final = "generators"
"""The key below which a RandomState has its generators, in one value for each rank."""

_UNSEEDED: Final = frozenset({"python", "numpy"})
"""Generators that begin with other numbers in each process, unless it sets seeds. Their use shows in other values."""


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
        random_states = [name for name in names if f".{_GENERATORS}@" in f".{name}"]
        equals = {name: _is_equal(name, *readers) for name in names if name not in random_states}
        for name in random_states:
            equals |= _compare_generators(name, *readers)
    return StateComparison(
        steps=(first.step, second.step),
        equal=tuple(name for name, is_equal in equals.items() if is_equal),
        differing=tuple(name for name, is_equal in equals.items() if not is_equal),
        has_random_state=bool(random_states),
    )


def _is_equal(name: str, one: CheckpointReader, other: CheckpointReader) -> bool:
    if (mine := one.tensors.get(name)) is not None:
        theirs = other.tensors.get(name)
        if theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
    elif name not in one.values or name not in other.values:
        return False
    return all(a == b for a, b in zip(_read(name, one), _read(name, other), strict=True))


def _compare_generators(name: str, *readers: CheckpointReader) -> dict[str, bool]:
    """Return for each generator of one rank whether it is equal, by its name."""
    one, other = (
        cast(Mapping[str, object], each.read_value(name)) if name in each.values else {} for each in readers
    )
    return {
        f"{name}.{key}": encode_value(key, one.get(key)) == encode_value(key, other.get(key))
        for key in sorted({*one, *other} - _UNSEEDED)
    }


def _read(name: str, reader: CheckpointReader) -> Iterator[bytes | memoryview]:
    """Read the bytes of a tensor's elements, in pieces of the same sizes for equal tensors, or those of a value."""
    if name in reader.tensors:
        yield from reader.read_elements(name)
        return
    path, offset_bytes, n_bytes = reader.values[name]
    with reader.files.open(path) as file:
        file.seek(offset_bytes)
        yield file.read(n_bytes)
