"""In every order of storage calls, with every fault up to a bound, the shipped code keeps the invariants of a root."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from storage_explorer.programs import attempt, collector, follower, reader, remover
from storage_explorer.replay import Program, shipped_code
from storage_explorer.world import Explored, Explorer


@dataclass(frozen=True)
class Scenario:
    """Processes around a root in which others have been before."""

    processes: Sequence[Program]
    told: str
    """What must have come about in some of the schedules, or they are worth nothing."""

    before: Sequence[Program] = (attempt(10),)
    faults: int = 0
    switches: int = -1
    """How often a process is interrupted by another; -1: however often."""

    crashes: Sequence[int] = ()


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
    assert explored.told >= set(scenario.told.split())
    assert explored.crashed == set(scenario.crashes)


BRANCHES = (attempt(10, 20, 30, last=3),)
NUMBERED = (attempt(5, start=0), attempt(10, last=2, restores=False, start=0))

TWO = (attempt(20), attempt(20))
THREE = (attempt(20, restores=False),) * 3
BESIDE_A_LATER_ONE = (attempt(20, start=1), attempt(30, 40, collects=True, start=2))
READ = (attempt(20, 30, restores=False), reader())
LOST = (attempt(20, restores=False), follower(30), attempt(30, restores=False))
ALL = (attempt(20, 30), attempt(20, 30), reader(), collector())
FEWER_SAVES = (attempt(20, restores=False), attempt(20, restores=False), reader(), collector())
RETURNING = (attempt(40, 15, last=3, returns=True), attempt(50, restores=False), reader())
LOST_RETURNING = (
    attempt(40, 15, last=3, restores=False, returns=True),
    follower(16, last=3),
    attempt(50, restores=False),
)
SLOW = (attempt(20, 30, 40, restores=False), reader(renews=1))
SLOWER = (attempt(20, 30, 40, 50, 60, restores=False), reader(renews=2), collector())
GOING_BACK = (attempt(25, 35, rewinds=True), attempt(40), reader())
REMOVING = (attempt(40, last=3), remover(10), reader(oldest=True))
FORGETTING = (attempt(15, 5, 40, forgets=True), attempt(20))
LOST_FORGETTING = (attempt(5, forgets=True), follower(6, forgets=True), attempt(50, restores=False))
CONDEMNING = (attempt(20, quarantines=True), attempt(20, quarantines=True))

TWO_TOLD = "claimed committed refused fenced "
READ_TOLD = "committed held let-go "
LEASE_TOLD = READ_TOLD + "renewed lost away"
LOST_TOLD = "committed voided "
REMOVING_TOLD = READ_TOLD + "removed kept fenced"
BRANCH_TOLD = "forgot followed committed "

QUICK = {
    "two-attempts": Scenario(TWO, TWO_TOLD),
    "one-attempt-and-two-faults": Scenario([attempt(20, 30)], "committed voided", faults=2),
    "an-attempt-beside-a-later-one": Scenario(BESIDE_A_LATER_ONE, TWO_TOLD, before=NUMBERED, switches=2),
    "a-condemned-commit-and-a-fault": Scenario(CONDEMNING[:1], LOST_TOLD, before=BRANCHES, faults=1),
    "a-reader-and-a-deletion": Scenario(READ, READ_TOLD),
    "a-reader-a-deletion-and-a-fault": Scenario(READ, READ_TOLD, faults=1, switches=2),
    "a-slow-reader-that-renews": Scenario(SLOW, LEASE_TOLD, switches=3),
    "a-reader-that-stops": Scenario(SLOW, "committed held", switches=2, crashes=(1,)),
    "a-lost-companion": Scenario(LOST[:2], LOST_TOLD, faults=1, crashes=(0,)),
    "a-lost-companion-and-a-start": Scenario(LOST, LOST_TOLD + "fenced", switches=1, crashes=(0,)),
    "going-back-under-a-claim-and-a-fault": Scenario(
        RETURNING[:1], LOST_TOLD + "followed", before=BRANCHES, faults=1
    ),
    "a-companion-lost-while-going-back": Scenario(
        LOST_RETURNING[:2], LOST_TOLD + "followed", before=BRANCHES, faults=1, crashes=(0,)
    ),
    "a-process-that-restored-nothing": Scenario(
        FORGETTING, BRANCH_TOLD + "fenced", before=BRANCHES, switches=2
    ),
    "a-process-that-restored-nothing-and-a-fault": Scenario(
        [attempt(40, 15, 35, last=3, forgets=True)], BRANCH_TOLD + "voided", before=BRANCHES, faults=1
    ),
    "a-process-that-restored-a-part": Scenario(
        [attempt(15, 5, 40, restored=None)], BRANCH_TOLD, before=BRANCHES
    ),
    "a-process-that-saves-something-else": Scenario(
        [attempt(15, 5, 40, restored=("v", "w"))], BRANCH_TOLD, before=BRANCHES
    ),
    "a-companion-lost-while-a-branch-begins": Scenario(
        LOST_FORGETTING[:2], LOST_TOLD + BRANCH_TOLD, faults=1, crashes=(0,)
    ),
    "a-removal": Scenario(REMOVING, REMOVING_TOLD, before=BRANCHES, switches=2),
    "all-at-once": Scenario(ALL, TWO_TOLD + READ_TOLD, switches=1),
}
LONG = {
    "two-attempts-and-a-fault": Scenario(TWO, TWO_TOLD + "voided", faults=1),
    "two-attempts-and-two-faults": Scenario(THREE[:2], TWO_TOLD + "voided", faults=2, switches=2),
    "a-longer-deletion-and-a-fault": Scenario(READ, READ_TOLD, faults=1),
    "a-reader-that-renews-often": Scenario(SLOW, LEASE_TOLD, switches=5),
    "a-reader-that-renews-twice": Scenario(SLOWER, LEASE_TOLD, switches=3),
    "a-lost-companion-a-start-and-a-fault": Scenario(LOST, LOST_TOLD, faults=1, switches=1, crashes=(0,)),
    "three-attempts": Scenario(THREE, TWO_TOLD, switches=3),
    "going-back": Scenario(GOING_BACK, TWO_TOLD + READ_TOLD, before=BRANCHES, switches=2),
    "going-back-and-a-fault": Scenario(
        GOING_BACK, TWO_TOLD + READ_TOLD, before=BRANCHES, faults=1, switches=1
    ),
    "going-back-under-a-claim": Scenario(
        RETURNING, TWO_TOLD + READ_TOLD + "followed", before=BRANCHES, faults=1, switches=1
    ),
    "a-companion-lost-while-going-back-and-a-start": Scenario(
        LOST_RETURNING, LOST_TOLD + "fenced followed", before=BRANCHES, switches=2, crashes=(0,)
    ),
    "processes-that-restored-nothing": Scenario(
        [*FORGETTING, attempt(5, 8, forgets=True)], BRANCH_TOLD + "fenced", before=BRANCHES, switches=2
    ),
    "one-that-restored-nothing-beside-another-and-a-fault": Scenario(
        FORGETTING, BRANCH_TOLD + "fenced voided", before=BRANCHES, faults=1, switches=1
    ),
    "a-companion-lost-while-a-branch-begins-and-a-start": Scenario(
        LOST_FORGETTING, LOST_TOLD + BRANCH_TOLD + "fenced", before=BRANCHES, switches=2, crashes=(0,)
    ),
    "condemned-commits": Scenario(CONDEMNING, TWO_TOLD, before=BRANCHES, switches=2),
    "condemned-commits-and-a-fault": Scenario(CONDEMNING, TWO_TOLD, before=BRANCHES, faults=1, switches=1),
    "a-removal-and-a-fault": Scenario(REMOVING, REMOVING_TOLD, before=BRANCHES, faults=1, switches=2),
    "all-at-once-and-a-fault": Scenario(FEWER_SAVES, TWO_TOLD + READ_TOLD, faults=1, switches=1),
    "all-at-once-interrupted-twice": Scenario(ALL, TWO_TOLD + READ_TOLD, switches=2),
}
WHOLE = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(scenario, id=name) for name, scenario in QUICK.items()),
        *(pytest.param(scenario, id=name, marks=WHOLE) for name, scenario in LONG.items()),
    ],
)
def test_no_schedule_breaks_an_invariant(region: int, scenario: Scenario) -> None:
    check(explorer(region, scenario).explore(), scenario)


CROWD = Scenario(
    [
        attempt(20, 30, 40, last=2, quarantines=True),
        attempt(20, 25, 50, rewinds=True),
        attempt(15, 35, 45, last=2, returns=True),
        follower(45),
        reader(holder="an evaluation"),
        reader(holder="a fork"),
        collector(),
        remover(20),
        attempt(60, 70, quarantines=True),
        attempt(55, 5, 25, last=2, forgets=True),
    ],
    TWO_TOLD + READ_TOLD + "voided kept forgot",
    before=BRANCHES,
    faults=6,
    crashes=(0,),
)


# An explorer remembers each state that it has seen: 10,000 walks of one take 16 GiB.
PARTS = [pytest.param(1000, marks=WHOLE, id=f"1000-{part}") for part in range(5)]


@pytest.mark.parametrize("walks", [50, *PARTS])
def test_no_random_schedule_of_a_crowd_breaks_an_invariant(region: int, walks: int) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", "0")) or int.from_bytes(os.urandom(4))
    print(f"STEPKEEPER_SEED={seed}")
    check(explorer(region, CROWD).wander(seed, walks), CROWD)
