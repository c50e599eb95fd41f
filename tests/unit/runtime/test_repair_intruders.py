"""A process that lags behind takes a slot whose entry was removed: no start goes on from there, and a repair does."""

import secrets
from collections.abc import Callable

import pytest
from store_parts.damaged_root import IMPATIENT, damage, goes_on, planned, repaired

from stepkeeper.errors import DamagedEntryError
from stepkeeper.log import Claim, Log
from stepkeeper.log.tail import slot_path
from stepkeeper_testing.checkpoints import SmallRoot, save_small


def commits(root: SmallRoot, log: Log, claim: Claim) -> None:
    save_small(log, root.store, claim, 35)


def gives_up(_: SmallRoot, log: Log, claim: Claim) -> None:
    log.void(claim, "given up", f"35/{claim.slot}-" + "a" * 32)


def filled(hole: int, act: Callable[[SmallRoot, Log, Claim], None]) -> SmallRoot:
    """Make a root with slots 0 begin, 1 and 2 steps 10 and 20, 3 begin, 4 and 5 steps 30 and 40.

    One of its slots is emptied, and taken by a process that has read those before it.
    """
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    root.begin()
    late = Log(root.store, patience=IMPATIENT)
    grows: tuple[Callable[[], object], ...] = (
        lambda: root.save(10, world_size=2),
        lambda: root.save(20),
        lambda: root.begin(1),
        lambda: root.save(30),
    )
    for number, grow in enumerate(grows, 1):
        if number == hole:
            late.resume(root.claim)
            claim = root.claim
        grow()
    root.save(40, world_size=2)
    damage(root, [hole], "gone")
    act(root, late, claim)
    return root


@pytest.mark.parametrize(("hole", "act"), [(3, gives_up), (3, commits), (4, gives_up)])
def test_what_came_into_an_emptied_slot_is_told_from_its_own_entry(
    hole: int, act: Callable[[SmallRoot, Log, Claim], None]
) -> None:
    root = filled(hole, act)
    intruder = root.store.read(slot_path(hole))
    with pytest.raises(DamagedEntryError, match="stepkeeper repair memory://"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert state.latest is not None
    assert state.latest.step == 40
    assert [record.step for record in state.live] == [10, 20, 30, 40]
    assert root.store.read(slot_path(hole)) == intruder
    if act is commits:
        assert [record.step for record in state.commits.values() if record.quarantined] == [35]
    goes_on(root, state)


def test_below_an_index_it_costs_nothing_but_who_took_the_slot() -> None:
    root = filled(2, gives_up)
    assert [record.step for record in Log(root.store, patience=IMPATIENT).open().live] == [10, 20, 30, 40]
    assert not planned(root.store).is_needed
