"""Tell a random story of a job from a seed, and bring it to rest."""

import random
from typing import Any, Final

from operator_stories.happenings import HAPPENINGS, mend_the_spec
from operator_stories.properties import find_false_standstill
from operator_stories.teller import Teller

from fake_cluster.world import World

__all__ = ["SLICES", "come_to_rest", "tell"]

_ONE_SLICE: Final[dict[str, Any]] = {"hosts": {"count": 2}}
_TWO_SLICES: Final[dict[str, Any]] = {
    "tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2, "provisioning": "Spot"}
}
SLICES: Final = {1: _ONE_SLICE, 2: _TWO_SLICES}
_MAX_ROUNDS: Final = 40
_QUIET: Final = 3


async def tell(seed: int) -> Teller:
    """Tell the story of this seed: a few things happen, with time and a part of their consequences after each."""
    world = _make_world(rng := random.Random(seed))
    spec = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]["spec"]
    teller = Teller(world=world, random=rng, spec=spec)
    await teller.world.run_until_settled(rounds=4)
    for _ in range(rng.randint(1, 9)):
        happening = rng.choice(HAPPENINGS)
        happening(teller)
        teller.told.append(happening.__name__)
        for _ in range(rng.randint(0, 4)):
            await _go_on(teller)
    return teller


async def come_to_rest(teller: Teller) -> None:
    """Let all watches be right again, resume the job, and let back-offs, grace periods and guesses pass."""
    world = teller.world
    world.deliver_watches()
    mend_the_spec(teller)
    world.edit(suspend=False)
    world.controllers.kueue.quota = True
    quiet = 0
    for _ in range(_MAX_ROUNDS):
        before = world.cluster.version
        await world.run_until_settled(rounds=3)
        _note_faults(teller)
        world.now += 120
        quiet = quiet + 1 if world.cluster.version == before else 0
        if quiet == _QUIET:  # after an hour the pods that go on after another one is done are told of
            world.now += 3600
        if quiet > _QUIET:
            return
    raise AssertionError("it doesn't come to rest")


def _note_faults(teller: Teller) -> None:
    if (fault := find_false_standstill(teller)) is not None and fault not in teller.faults:
        teller.faults.append(fault)


def _make_world(rng: random.Random) -> World:
    restarts = {
        "maxFailures": rng.choice([2, 50, 50]),
        "backoff": {"initialSeconds": 1, "maxSeconds": 5},
        "maxStartsWithoutCheckpoint": rng.choice([3, 20, 20]),
    }
    world = World(placement=SLICES[rng.choice([1, 1, 2])], spot=True, restarts=restarts)
    if rng.random() < 0.25:  # a quarter of the stories
        world.controllers.kueue.install(default_queue="default")
    world.controllers.kubelets.stop_s = rng.choice([0, 0, 1, 20])
    world.controllers.kubelets.stop_code = rng.choice([143, 143, 1, 75, 0])
    return world


async def _go_on(teller: Teller) -> None:
    kind = teller.random.choice(["reconcile", "step", "sync", "both"])
    if kind in {"reconcile", "both"}:
        await teller.world.reconcile()
        _note_faults(teller)
    if kind == "step":
        teller.world.controllers.step()
    if kind in {"sync", "both"}:
        teller.world.controllers.sync()
    teller.world.now += teller.random.choice([0, 1, 1, 2])
    teller.told.append(kind)
