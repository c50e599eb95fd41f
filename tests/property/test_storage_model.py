"""Every order of the storage calls of several processes, with faults: nothing committed is lost, nothing stale gets in.

The processes run the shipped log, companion session, retention, collection and pins. What is checked after each step
is read from the bytes in the store, by a reading of its own. A process that crashes is one that is never scheduled
again: since the invariants hold after every step, whatever the others do then, each crash is in here too.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from storage_explorer.programs import attempt, collector, follower, reader, remover
from storage_explorer.repairs import beside_damage, damager, repairer
from storage_explorer.replay import Program, shipped_code
from storage_explorer.world import Explored, Explorer


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Processes around a root in which others have been before."""

    processes: Sequence[Program]
    before: Sequence[Program] = (attempt(10),)
    faults: int = 0
    switches: int = -1
    """How often a process is interrupted by another; -1: however often."""

    crashes: Sequence[int] = ()
    told: frozenset[str] = frozenset()
    """What must have come about in some of the schedules, or they are worth nothing."""

    sent: frozenset[str] = frozenset()
    """Objects whose puts and writes must have been lost, late, there twice and done without an answer in some."""


@pytest.fixture(scope="module")
def region() -> Iterator[int]:
    # An index in every fourth entry, so that short logs are opened from one, too.
    with shipped_code(index_every=4) as region:
        yield region


def explorer(region: int, scenario: Scenario) -> Explorer:
    objects: Mapping[str, bytes] = {}
    for program in scenario.before:
        history = Explorer([program], region, objects=objects)
        objects = history.objects(history.alone(history.start))
    return Explorer(
        scenario.processes,
        region,
        objects=objects,
        faults=scenario.faults,
        switches=scenario.switches,
        crashes=scenario.crashes,
    )


def check(explored: Explored, scenario: Scenario) -> None:
    print(explored)
    assert explored.told >= scenario.told
    assert not explored.unexplored(scenario.sent)
    assert {process for fate, process in explored.fates if fate == "crash"} == {
        f"process {number}" for number in scenario.crashes
    }


WRITTEN = frozenset({"__0_0.distcp", "manifest.0.json", ".metadata"})
SENT = WRITTEN | {"begin", "restored", "commit", "delete"}
TWO = (attempt(20), attempt(20))
TWO_TOLD = frozenset({"claimed", "committed", "refused", "fenced"})
READ = (attempt(20, 30, restores=False), reader())
READ_TOLD = frozenset({"committed", "held", "let go"})
LOST = (attempt(20, restores=False), follower(0, 30), attempt(30, restores=False))
LOST_TOLD = frozenset({"committed", "voided", "fenced"})
BRANCHES = (attempt(10, 20, 30, last=3),)
ALL = (attempt(20, 30), attempt(20, 30), reader(), collector())
FEWER_SAVES = (attempt(20, restores=False), attempt(20, restores=False), reader(), collector())
RETURNING = (attempt(40, 15, last=3, returns=True), attempt(50, restores=False), reader())
LOST_RETURNING = (attempt(40, 15, last=3, restores=False, returns=True), follower(0, 16, last=3))
SLOW = (attempt(20, 30, 40, restores=False), reader(renews=1))
SLOWER = (attempt(20, 30, 40, 50, 60, restores=False), reader(renews=2), collector())
LEASE_TOLD = READ_TOLD | {"committed", "renewed", "lost", "away"}
LAGGING = (attempt(20, 30, restores=False, lags=True), reader())
LAGGING_LONGER = (attempt(20, 30, 40, restores=False, lags=True), reader())
GOING_BACK = (attempt(25, 35, rewinds=True), attempt(40), reader())
REMOVING = (attempt(40, last=3), remover(10), reader(oldest=True))
REMOVING_TOLD = READ_TOLD | {"committed", "removed", "kept", "fenced"}
FORGETTING = (attempt(15, 5, 40, forgets=True), attempt(20))
FORGETTING_TOLD = frozenset({"forgot", "followed", "committed", "fenced"})
LOST_FORGETTING = (attempt(5, forgets=True), follower(0, 6, forgets=True))
SAVING = beside_damage(attempt(40, last=2, repaired=True))
REPAIRING = (SAVING, damager(2, 5, 6), repairer())
REPAIRING_GONE = (SAVING, damager(1, 2, gone=True), repairer())
REPAIR_TOLD = frozenset({"committed", "damaged", "stopped", "fenced", "repaired", "not repaired"})
FORGOTTEN = (*BRANCHES, attempt(5, last=3, forgets=True))
CONDEMNING = (attempt(20, quarantines=True), attempt(20, quarantines=True))

QUICK = {
    "two-attempts": Scenario(processes=TWO, told=TWO_TOLD),
    "two-attempts-and-a-fault": Scenario(
        processes=TWO, faults=1, switches=2, told=TWO_TOLD | {"voided"}, sent=SENT
    ),
    "one-attempt-and-two-faults": Scenario(
        processes=[attempt(20, 30)], faults=2, told=frozenset({"committed", "voided"}), sent=SENT | {"void"}
    ),
    "a-condemned-commit-and-a-fault": Scenario(
        processes=CONDEMNING[:1],
        before=BRANCHES,
        faults=1,
        told=frozenset({"committed", "voided"}),
        sent=SENT | {"quarantine"},
    ),
    "a-reader-and-a-deletion": Scenario(processes=READ, told=READ_TOLD),
    "a-reader-a-deletion-and-a-fault": Scenario(
        processes=READ, faults=1, switches=2, told=READ_TOLD, sent=WRITTEN | {"commit", "delete", "pin"}
    ),
    "a-slow-reader-that-renews": Scenario(processes=SLOW, switches=3, told=LEASE_TOLD),
    "a-reader-that-stops": Scenario(
        processes=SLOW, switches=2, crashes=(1,), told=frozenset({"committed", "held"})
    ),
    "a-lost-companion": Scenario(processes=LOST[:2], faults=1, crashes=(0,), told=LOST_TOLD - {"fenced"}),
    "a-lost-companion-and-a-start": Scenario(processes=LOST, switches=1, crashes=(0,), told=LOST_TOLD),
    "three-attempts": Scenario(processes=[attempt(20, restores=False)] * 3, switches=2, told=TWO_TOLD),
    "going-back": Scenario(
        processes=GOING_BACK,
        before=BRANCHES,
        switches=2,
        told=TWO_TOLD | READ_TOLD,
    ),
    "going-back-under-a-claim": Scenario(
        processes=RETURNING, before=BRANCHES, switches=2, told=TWO_TOLD | READ_TOLD | {"followed"}
    ),
    "going-back-under-a-claim-and-a-fault": Scenario(
        processes=RETURNING[:1],
        before=BRANCHES,
        faults=1,
        told=frozenset({"followed", "committed", "voided"}),
    ),
    "a-companion-lost-while-going-back": Scenario(
        processes=LOST_RETURNING,
        before=BRANCHES,
        faults=1,
        crashes=(0,),
        told=LOST_TOLD - {"fenced"} | {"followed"},
    ),
    "a-process-that-restored-nothing": Scenario(
        processes=FORGETTING, before=BRANCHES, switches=2, told=FORGETTING_TOLD
    ),
    "a-process-that-restored-a-part": Scenario(
        processes=[attempt(15, 5, 40, restored=None)], before=BRANCHES, told=FORGETTING_TOLD - {"fenced"}
    ),
    "a-process-that-saves-something-else": Scenario(
        processes=[attempt(15, 5, 40, restored=("v", "w"))],
        before=BRANCHES,
        told=FORGETTING_TOLD - {"fenced"},
    ),
    "a-condemned-branch": Scenario(
        processes=[attempt(35, last=3, quarantines=True), attempt(36, last=3, quarantines=True)],
        before=FORGOTTEN,
        switches=2,
        told=TWO_TOLD | {"fell back"},
    ),
    "a-condemned-branch-and-a-fault": Scenario(
        processes=[attempt(35, last=3, quarantines=True)],
        before=FORGOTTEN,
        faults=1,
        told=frozenset({"committed", "fell back"}),
        sent=frozenset({"begin", "quarantine"}),
    ),
    "a-process-that-restored-nothing-and-a-fault": Scenario(
        processes=[attempt(40, 15, 35, last=3, forgets=True)],
        before=BRANCHES,
        faults=1,
        told=FORGETTING_TOLD - {"fenced"} | {"voided"},
    ),
    "a-companion-lost-while-a-branch-begins": Scenario(
        processes=LOST_FORGETTING,
        faults=1,
        crashes=(0,),
        told=LOST_TOLD - {"fenced"} | {"forgot", "followed"},
    ),
    "saves-before-what-comes-after-commits": Scenario(processes=LAGGING, switches=1, told=READ_TOLD),
    "saves-before-what-comes-after-commits-and-a-fault": Scenario(
        processes=LAGGING[:1], faults=1, told=frozenset({"committed", "voided"})
    ),
    "condemned-commits": Scenario(processes=CONDEMNING, before=BRANCHES, switches=2, told=TWO_TOLD),
    "a-removal": Scenario(processes=REMOVING, before=BRANCHES, switches=2, told=REMOVING_TOLD),
    "a-repair": Scenario(processes=REPAIRING, before=BRANCHES, switches=2, told=REPAIR_TOLD),
    "a-repair-of-a-gap": Scenario(
        processes=REPAIRING_GONE, before=BRANCHES, switches=2, told=REPAIR_TOLD - {"stopped"}
    ),
    "a-repair-and-a-fault": Scenario(
        processes=[damager(1, 2), repairer()],
        before=BRANCHES,
        faults=1,
        switches=1,
        told=frozenset({"repaired", "nothing to repair"}),
        sent=frozenset({"begin"}),
    ),
    "two-repairs": Scenario(
        processes=[damager(1, 2, gone=True), repairer(), repairer()],
        before=BRANCHES,
        switches=2,
        told=frozenset({"repaired", "not repaired", "nothing to repair"}),
    ),
    "a-look-at-what-a-repair-would-do": Scenario(
        processes=[SAVING, damager(1, 2), repairer(dry_run=True)],
        before=BRANCHES,
        switches=2,
        told=frozenset({"committed", "damaged", "looked"}),
    ),
    "all-at-once": Scenario(processes=ALL, switches=1, told=TWO_TOLD | READ_TOLD),
}
LONG = {
    "two-attempts-and-a-fault": Scenario(processes=TWO, faults=1, told=TWO_TOLD | {"voided"}, sent=SENT),
    "two-attempts-and-two-faults": Scenario(
        processes=[attempt(20, restores=False)] * 2, faults=2, switches=2, told=TWO_TOLD | {"voided"}
    ),
    "a-reader-a-deletion-and-a-fault": Scenario(processes=READ, faults=1, told=READ_TOLD),
    "a-reader-a-deletion-and-two-faults": Scenario(processes=READ, faults=2, switches=2, told=READ_TOLD),
    "a-slow-reader-that-renews": Scenario(processes=SLOW, switches=5, told=LEASE_TOLD),
    "a-slow-reader-that-renews-twice": Scenario(processes=SLOWER, switches=3, told=LEASE_TOLD),
    "a-lost-companion": Scenario(processes=LOST, faults=1, switches=1, crashes=(0,), told=LOST_TOLD),
    "three-attempts": Scenario(processes=[attempt(20, restores=False)] * 3, switches=3, told=TWO_TOLD),
    "going-back": Scenario(
        processes=GOING_BACK, before=BRANCHES, faults=1, switches=1, told=TWO_TOLD | READ_TOLD
    ),
    "going-back-under-a-claim": Scenario(
        processes=RETURNING, before=BRANCHES, faults=1, switches=1, told=TWO_TOLD | READ_TOLD | {"followed"}
    ),
    "a-companion-lost-while-going-back": Scenario(
        processes=[*LOST_RETURNING, attempt(50, restores=False)],
        before=BRANCHES,
        switches=2,
        crashes=(0,),
        told=LOST_TOLD | {"followed"},
    ),
    "saves-before-what-comes-after-commits": Scenario(processes=LAGGING_LONGER, switches=2, told=READ_TOLD),
    "saves-before-what-comes-after-commits-and-a-fault": Scenario(
        processes=LAGGING_LONGER[:1], faults=1, told=frozenset({"committed", "voided"})
    ),
    "processes-that-restored-nothing": Scenario(
        processes=[*FORGETTING, attempt(5, 8, forgets=True)],
        before=BRANCHES,
        switches=2,
        told=FORGETTING_TOLD,
    ),
    "a-process-that-restored-nothing-and-a-fault": Scenario(
        processes=FORGETTING, before=BRANCHES, faults=1, switches=1, told=FORGETTING_TOLD | {"voided"}
    ),
    "a-companion-lost-while-a-branch-begins": Scenario(
        processes=[*LOST_FORGETTING, attempt(50, restores=False)],
        before=BRANCHES,
        switches=2,
        crashes=(0,),
        told=LOST_TOLD | {"forgot", "followed"},
    ),
    "condemned-commits": Scenario(processes=CONDEMNING, before=BRANCHES, faults=1, switches=1, told=TWO_TOLD),
    "a-repair": Scenario(processes=REPAIRING, before=BRANCHES, switches=4, told=REPAIR_TOLD),
    "a-repair-of-a-gap-and-a-fault": Scenario(
        processes=REPAIRING_GONE, before=BRANCHES, faults=1, switches=2, told=REPAIR_TOLD - {"stopped"}
    ),
    "a-removal-and-a-fault": Scenario(
        processes=REMOVING, before=BRANCHES, faults=1, switches=2, told=REMOVING_TOLD, sent=SENT | {"pin"}
    ),
    "all-at-once-and-a-fault": Scenario(
        processes=FEWER_SAVES, faults=1, switches=1, told=TWO_TOLD | READ_TOLD
    ),
    "all-at-once-interrupted-twice": Scenario(processes=ALL, switches=2, told=TWO_TOLD | READ_TOLD),
}


FOR_TEST_ALL = {
    "two-attempts-and-a-fault",
    "three-attempts",
    "going-back",
    "going-back-under-a-claim",
    "a-condemned-branch",
    "condemned-commits",
    "saves-before-what-comes-after-commits-and-a-fault",
}
"""Of the quick ones, those that take ten seconds."""
assert QUICK.keys() >= FOR_TEST_ALL


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=name, marks=[pytest.mark.long] if name in FOR_TEST_ALL else [])
        for name, scenario in QUICK.items()
    ],
)
def test_no_schedule_breaks_an_invariant(region: int, scenario: Scenario) -> None:
    check(explorer(region, scenario).explore(), scenario)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", LONG.values(), ids=LONG.keys())
def test_no_longer_schedule_breaks_an_invariant(region: int, scenario: Scenario) -> None:
    check(explorer(region, scenario).explore(), scenario)


CROWD = Scenario(
    processes=[
        attempt(20, 30, 40, last=2, quarantines=True),
        attempt(20, 25, 50, rewinds=True),
        attempt(15, 35, 45, last=2, returns=True),
        follower(0, 45),
        reader(holder="an evaluation"),
        reader(holder="a fork"),
        collector(),
        remover(20),
        attempt(60, 70, quarantines=True),
        attempt(55, 5, 25, last=2, forgets=True),
    ],
    before=BRANCHES,
    faults=6,
    crashes=(0,),
    told=TWO_TOLD | READ_TOLD | {"voided", "kept", "forgot"},
)


def seed() -> int:
    """STEPKEEPER_SEED, or a new one; it is printed, and named where a schedule fails."""
    chosen = int(os.environ.get("STEPKEEPER_SEED", "0")) or int.from_bytes(os.urandom(4))
    print(f"STEPKEEPER_SEED={chosen}")
    return chosen


def test_no_random_schedule_of_a_crowd_breaks_an_invariant(region: int) -> None:
    check(explorer(region, CROWD).wander(seed(), walks=150), CROWD)


REPAIRED_CROWD = Scenario(
    processes=[
        beside_damage(attempt(40, 50, last=2, repaired=True)),
        beside_damage(attempt(45, 55, last=2, repaired=True)),
        damager(2, 4, 5, 6, 7),
        # Slots that every process knows to be taken. One that it doesn't know it would take, and then the log no longer
        # tells what was in there: test_repair.py.
        damager(1, 2, 3, gone=True),
        repairer(),
        repairer(),
        repairer(dry_run=True),
        beside_damage(reader()),
        beside_damage(collector()),
    ],
    before=BRANCHES,
    faults=3,
    told=READ_TOLD | REPAIR_TOLD | {"looked"},
)


def test_no_random_schedule_of_a_crowd_and_its_repairs_breaks_an_invariant(region: int) -> None:
    check(explorer(region, REPAIRED_CROWD).wander(seed(), walks=60), REPAIRED_CROWD)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_random_schedule_of_many_and_their_repairs_breaks_an_invariant(region: int) -> None:
    check(explorer(region, REPAIRED_CROWD).wander(seed(), walks=5_000), REPAIRED_CROWD)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_random_schedule_of_many_breaks_an_invariant(region: int) -> None:
    many = replace(CROWD, sent=SENT | {"void", "pin", "quarantine"})
    check(explorer(region, many).wander(seed(), walks=10_000), many)
