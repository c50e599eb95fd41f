"""Tell a random story of a job from a seed, bring it to rest, and count what was done: the status must fit that."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from fake_cluster.job_machines import machines, world_of
from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, Hang, Report

_SPOT: Final[dict[str, Any]] = {"spot": {}}
_PLACEMENTS: Final[dict[str, dict[str, Any]]] = {
    "one slice": {"hosts": {"count": 2}},
    "two slices": {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2, "provisioning": "Spot"}},
}
_MAX_ROUNDS: Final = 40
_QUIET: Final = 3


@dataclass(slots=True)
class Teller:
    """Lets things happen in a world, at random."""

    world: World
    random: random.Random
    spec: dict[str, Any]
    """The spec that the job began with."""
    on_machines: bool
    """Whether the job names a QueuedResource."""
    failures: int = 0
    """How often the application failed by itself."""
    fenced: bool = False
    """Whether a trainer found that another job owns its root."""
    deletions: int = 0
    """How often somebody deleted a pod, or the Job or JobSet of pods."""
    unseen: bool = False
    """Whether ends can have come that the operator did not see: it was away, or JobSet was quicker by two restarts."""
    restarts_seen: int = 0
    """JobSet's restarts when the operator last reconciled."""
    done: dict[str, float] = field(default_factory=dict)
    """When pods exited 0 by themselves, by their uids."""
    moved_at: float = 0.0
    """When a report last showed another step, or a new commit."""
    hangs: bool = False
    """Whether the last report named a hang."""
    step: int = 0
    asked: int = 0
    """How many restarts a user asked for."""
    asked_value: str | None = None
    """The newest value of the annotation, though it was removed since."""
    told: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What was wrong on the way."""

    def alive(self) -> list[dict[str, Any]]:
        """List the pods whose trainers run: no silent kubelet has them, and nobody told them to end."""
        return [
            pod
            for pod in self.world.pods
            if pod["status"]["phase"] == "Running"
            and pod["spec"]["nodeName"] not in self.world.controllers.stuck
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def count_finished(self) -> int:
        """Count the hosts that have exited 0 in the present attempt, also those told to stop: Jobs make no others."""
        return sum(
            len(job["status"].get("completedIndexes", ())) for job in self.world.cluster.list_objects("jobs")
        )

    def count_restarts(self) -> int:
        """Return how often JobSet has restarted the job in place."""
        jobset = self.world.jobset
        return 0 if jobset is None else jobset.get("status", {}).get("restarts", 0)

    def known_sequence(self) -> int:
        """Return the number of the commit that the status shows."""
        checkpoint = self.world.status.checkpoint
        return 0 if checkpoint is None or checkpoint.latest is None else checkpoint.latest.sequence

    def end_one(self, code: int, *messages: str) -> None:
        """End one of the running trainers, with one of these messages."""
        if alive := self.alive():
            pod = self.random.choice(alive)
            self.failures += code not in {0, ExitCode.SAVED}
            self.fenced |= code == ExitCode.FENCED
            if code == 0:
                self.done[pod["metadata"]["uid"]] = self.world.now
            message = self.random.choice(messages) if messages else ""
            self.world.controllers.end_pod(pod, code, message=message)

    def disrupt_one(self, reason: str, code: int | None) -> None:
        """Let a pod be told to go, and end if there is a code."""
        if alive := self.alive():
            pod = self.random.choice(alive)
            self.world.controllers.disrupt(pod, reason)
            if code is not None:
                self.world.controllers.end_pod(pod, code)

    def report(
        self, *, steps: int = 0, commits: bool = False, after_s: float = 0.0, hang: Hang | None = None
    ) -> None:
        """Report so many steps more, or a hang, from one of the pods that run."""
        known = self.known_sequence()
        self.world.now += after_s
        self.step += steps
        if steps or commits:
            self.moved_at = self.world.now
        if commits:
            self._receive(training_report(known + 1, self.step))
        else:
            report = training_report(known, self.step, commits=(), head=None, root=None, hang=hang)
            self._receive(report)

    def _receive(self, report: Report) -> None:
        present = [pod for pod in self.world.pods if "deletionTimestamp" not in pod["metadata"]]
        ranks = [rank for rank, pod in enumerate(present) if pod in self.alive()]
        if ranks:
            self.hangs = report.hang is not None
            self.world.receive_report(report, rank=ranks[0])

    def lose_machines(self, state: str) -> None:
        """Let the machines go: their kubelets say nothing any more, and no pod starts on them."""
        self.world.controllers.gone.update(f"n{number}" for number in range(1, 5))
        gone = machines(tier=_SPOT, active=False, joined=False, state=state)
        self.world.cluster.put("queuedresources", gone)

    def return_machines(self, uid: str = "uid-a") -> None:
        self.world.controllers.gone.clear()
        self.world.controllers.stuck.clear()
        self.world.cluster.put("queuedresources", machines(tier=_SPOT, uid=uid))

    def return_capacity(self) -> None:
        if not self.on_machines:
            self.world.controllers.gone.clear()

    def mend_the_spec(self) -> None:
        """Take back what was refused, and keep the other edits."""
        raw = self.world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
        good = {key: value for key, value in raw["spec"].items() if value not in ("soon", "somewhere")}
        if good != raw["spec"]:
            lost = {key: value for key, value in self.spec.items() if key not in good}
            self.world.cluster.put("checkpointedtrainingjobs", raw | {"spec": good | lost})
            self.world.edit()


Happening = Callable[[Teller], object]
Check = Callable[[Teller], str | None]


async def tell(seed: int, happenings: dict[str, Happening], check: Check, names: list[str]) -> Teller:
    """Tell the story of this seed: a few things happen, with time and a part of their consequences after each.

    What happens are `names`, if there are any. The check is made on the way.
    """
    rng = random.Random(seed)
    placement = "one slice" if names else rng.choice(["one slice", "one slice", "two slices", "machines"])
    world = _make_world(rng, placement)
    spec = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]["spec"]
    teller = Teller(world=world, random=rng, spec=spec, on_machines=placement == "machines")
    await teller.world.run_until_settled(rounds=4)
    for name in names or rng.choices(sorted(happenings), k=rng.randint(1, 9)):
        happenings[name](teller)
        teller.told.append(name)
        for _ in range(rng.randint(0, 4)):
            await _go_on(teller, check)
    return teller


async def come_to_rest(teller: Teller, check: Check) -> None:
    """Let all watches be right again, resume the job, and let back-offs, grace periods and guesses pass."""
    world = teller.world
    world.deliver_watches()
    teller.mend_the_spec()
    teller.return_capacity()
    if teller.on_machines:
        teller.return_machines()
    await world.reconcile()  # a start may have taken too long by now: the edit below forgives that
    world.controllers.sync()
    world.edit(suspend=False)
    world.controllers.kueue.quota = True
    quiet = 0
    for _ in range(_MAX_ROUNDS):
        before = world.cluster.version
        await world.run_until_settled(rounds=3)
        _note_fault(teller, check)
        world.now += 120
        quiet = quiet + 1 if world.cluster.version == before else 0
        if quiet == _QUIET:  # after an hour the pods that go on after another one is done are told of
            world.now += 3600
        if quiet > _QUIET:
            return
    raise AssertionError("it doesn't come to rest")


def _note_fault(teller: Teller, check: Check) -> None:
    if (fault := check(teller)) is not None and fault not in teller.faults:
        teller.faults.append(fault)


def _make_world(rng: random.Random, placement: str) -> World:
    restarts = {
        "maxFailures": rng.choice([2, 50, 50]),
        "backoff": {"initialSeconds": 1, "maxSeconds": 5},
        "maxStartsWithoutCheckpoint": rng.choice([3, 20, 20]),
    }
    deadline = rng.choice([{}, {"startDeadlineSeconds": 600}])
    if placement == "machines":
        return world_of(machines(tier=_SPOT), restarts=restarts, **deadline)
    hang = rng.choice([{"action": "Report"}, {"action": "Restart", "maxRestarts": 2}])
    world = World(placement=_PLACEMENTS[placement], spot=True, restarts=restarts, hang=hang, **deadline)
    if rng.random() < 0.25:  # a quarter of the stories
        world.controllers.kueue.install(default_queue="default")
    world.controllers.kubelets.stop_s = rng.choice([0, 0, 1, 20])
    world.controllers.kubelets.stop_code = rng.choice([143, 143, 1, 75, 0])
    return world


async def _go_on(teller: Teller, check: Check) -> None:
    kind = teller.random.choice(["reconcile", "step", "sync", "both"])
    if kind in {"reconcile", "both"}:
        await teller.world.reconcile()
        teller.restarts_seen = teller.count_restarts()
        _note_fault(teller, check)
    if kind == "step":
        teller.world.controllers.step()
    if kind in {"sync", "both"}:
        teller.world.controllers.sync()
    teller.unseen |= teller.count_restarts() > teller.restarts_seen + 1
    teller.world.now += teller.random.choice([0, 1, 1, 2])
    teller.told.append(kind)
