"""Find the steps of other writers in a root by the names of their objects. Pure but for the listing."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.log.records import CommitRecord, ForeignBase
from stepkeeper.log.state import LogState
from stepkeeper.storage import ObjectStat, Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "METADATA",
    "ForeignRecord",
    "ForeignStep",
    "Restorable",
    "find_steps",
    "find_steps_below",
    "find_steps_in",
    "find_unnamed_in",
    "name_record",
]

METADATA: Final = ".metadata"
"""The object that stock DCP writes last: without it nothing is complete."""

_NAME: Final = re.compile(r"(?:(?:global_?)?(?:step|checkpoint|ckpt|iter)[-_]?)?([0-9]{1,15})")
"""Matches a step's name: its number, perhaps after a word, as in step-100."""

_COMMIT: Final = re.compile(r"[0-9]+/[0-9]+-[0-9a-f]{32}")
_OURS: Final = re.compile(r"[0-9]+-[0-9a-f]{32}/.*")
"""Match a folder of one of our commits, and the path of an object of one in its step's folder."""

_DATA: Final = ".distcp"
"""The suffix of objects that stock DCP and torch_xla write data to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """A folder of the root with another writer's checkpoint, complete or not."""

    step: int
    folder: str
    objects: Mapping[str, int] = field(default_factory=dict)
    """Sizes in bytes by path, relative to the folder."""

    @property
    def size_bytes(self) -> int:
        return sum(self.objects.values())

    @property
    def is_finished(self) -> bool:
        """True if its writer finished it. Objects that were lost or cut later aren't noticed here."""
        return METADATA in self.objects

    @property
    def base(self) -> ForeignBase:
        """The step as the log names it."""
        return ForeignBase(step=self.step, folder=self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRecord:
    """A step of another writer that was restored, or can be; like a CommitRecord for a commit."""

    slot: int
    """The slot of the begin that continues from it; before there is one, the slot that it would get."""

    step: int
    folder: str

    @property
    def base(self) -> ForeignBase:
        """The step as the log names it."""
        return ForeignBase(step=self.step, folder=self.folder)


Restorable = CommitRecord | ForeignRecord
"""A checkpoint that a state can be restored from."""


def name_record(record: Restorable) -> str:
    """Name a checkpoint in messages for people."""
    if isinstance(record, ForeignRecord):
        return f"step {record.step} of another writer ({record.folder})"
    return f"the commit of step {record.step} ({record.folder})"


def find_steps(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> tuple[ForeignStep, ...]:
    """List the steps of other writers in a root, newest first, finished or not."""
    return find_steps_in(patience.retry(lambda: store.list("")))


def find_steps_in(listed: Collection[ObjectStat]) -> tuple[ForeignStep, ...]:
    """Find the steps of other writers among a root's objects, newest first.

    A folder of the root is a step if its name is a step's and it directly contains a `.metadata` or `.distcp`
    object. If two folders have the same step, the one with the shorter name comes first.
    """
    found: dict[tuple[int, str], dict[str, int]] = {}
    for stat in listed:
        folder, _, path = stat.path.partition("/")
        name = _NAME.fullmatch(folder)
        if path and name and not _OURS.fullmatch(path):
            found.setdefault((int(name[1]), folder), {})[path] = stat.size_bytes
    steps = [
        ForeignStep(step=step, folder=folder, objects=objects)
        for (step, folder), objects in found.items()
        if any(path == METADATA or ("/" not in path and path.endswith(_DATA)) for path in objects)
    ]
    return tuple(sorted(steps, key=lambda each: (-each.step, len(each.folder), each.folder)))


def find_unnamed_in(listed: Collection[ObjectStat]) -> tuple[str, ...]:
    """Find folders with checkpoints that don't count as steps, because of their names or their depth.

    "" is the root itself. This root's commits aren't included; those of a root below this one are.
    """
    paths = (stat.path.rpartition("/") for stat in listed)
    folders = {folder for folder, _, name in paths if name == METADATA}
    return tuple(sorted(each for each in folders if not (_NAME.fullmatch(each) or _COMMIT.fullmatch(each))))


def find_steps_below(state: LogState, find: Callable[[], Collection[ForeignStep]]) -> tuple[ForeignStep, ...]:
    """Find the steps that HEAD's line continues from: the one that it names, and all older ones.

    If nothing is committed these are all steps. `find`, which lists them, is called only if there can be one.
    """
    if not state.commits:
        return tuple(find())
    base = state.line[-1].legacy if state.line else state.legacy
    if base is None:
        return ()
    return tuple(each for each in find() if each.step < base.step or each.folder == base.folder)
