"""A writer is held up at each of its storage operations, its log is damaged and repaired, the next start saves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pytest

from stepkeeper.errors import FencedError
from stepkeeper.log import CommitRecord, Log
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out, plan_repair
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience
from stepkeeper.testing.checkpoints import save_small

IMPATIENT: Final = Patience(total_s=0, sleep=lambda _: None)
N_BEFORE: Final = 20
"""Entries before the writer's: their newest index is some entries back."""


@dataclass
class World:
    """A root, its writer, and what happens while the writer is held up."""

    held_up_at: int
    back: int
    """The entry that is damaged: so many before the newest."""

    how: str
    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    operations: int = 0
    repaired: int | None = None
    """The slot of the repair."""

    deleting: str = ""
    """The folder of the commit that the writer deletes. Once it has put the entry, it goes on, fenced or not."""

    told: list[CommitRecord] = field(default_factory=list)
    """The commits that the writer, or the next start, knows of."""

    def hook(self, moment: str, operation: str, path: str) -> None:
        self.operations += 1
        if self.operations == self.held_up_at:
            self.damage_and_repair()

    def store(self) -> MemoryStore:
        """A store of another process, which nothing holds up."""
        return MemoryStore(self.bucket)

    def damage_and_repair(self) -> None:
        log = Log(self.store(), patience=IMPATIENT)
        slot = max(log.open().tail - self.back, 0)
        data = self.bucket.objects.pop(slot_path(slot))
        if self.how == "gone" and self.back:
            pass
        else:
            self.bucket.objects[slot_path(slot)] = b"" if self.how == "gone" else data[:-1] + b"?"
        plan = plan_repair(self.store(), patience=IMPATIENT)
        if not plan.is_needed:
            return
        self.repaired = carry_out(self.store(), log, plan, "a test", patience=IMPATIENT).slot
        log.open()
        claim = log.begin()
        self.told.append(save_small(log, self.store(), claim, 70))
        gc(log, self.store(), patience=IMPATIENT)
        self.told.append(save_small(log, self.store(), claim, 80))

    def write(self) -> None:
        """Save, delete what is oldest, and save, as a job does."""
        quiet = Log(self.store())
        claim = quiet.begin()
        self.told += [save_small(quiet, self.store(), claim, step) for step in (1, 2)]
        while quiet.state.tail < N_BEFORE:
            quiet.mark_restored(claim, quiet.state.line[0].slot)
        store = MemoryStore(self.bucket, hook=self.hook)
        log = Log(store, patience=IMPATIENT)
        log.resume(claim)
        self.told.append(save_small(log, store, claim, 10))
        oldest = log.state.line[-1]
        self.told = [record for record in self.told if record.folder != oldest.folder]
        self.deleting = oldest.folder
        log.delete(claim, lambda state: [oldest.slot])
        sweep(store, [Garbage(folder=oldest.folder, slot=oldest.slot)], patience=IMPATIENT)
        self.told.append(save_small(log, store, claim, 20))
        log.void(claim, "given up", f"30/0-{'c' * 32}")


def count_operations() -> int:
    world = World(held_up_at=0, back=0, how="cut")
    world.write()
    return world.operations


@pytest.mark.parametrize("how", ["cut", "gone"])
@pytest.mark.parametrize("back", [0, 1, 2, 5])
def test_nothing_stale_follows_a_repair_and_nothing_told_is_lost(back: int, how: str) -> None:
    n_fenced = 0
    for at in range(1, count_operations() + 1):
        world = World(held_up_at=at, back=back, how=how)
        n_fenced += is_fenced(world.write)
        check(world)
    assert n_fenced > 10


def is_fenced(act: Callable[[], None]) -> bool:
    try:
        act()
    except FencedError:
        return True
    return False


def check(world: World) -> None:
    log = Log(world.store(), patience=IMPATIENT)
    state = log.open()
    there = {path.rpartition("/")[0] for path in world.bucket.objects}
    kept = {record.folder for record in state.commits.values()}
    assert kept - {world.deleting} <= there
    assert {record.folder for record in world.told} <= kept
    if world.repaired is not None:
        assert all(
            log.entry(slot).claim > world.repaired for slot in range(world.repaired + 1, state.tail + 1)
        )
        assert [record.step for record in state.line[:2]] == [80, 70]
