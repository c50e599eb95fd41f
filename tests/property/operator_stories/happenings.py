"""What can happen to a job and to the cluster around it, one function for each. The teller counts what it did."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stepkeeper.contract import ExitCode
from stepkeeper_operator.testing import World, saved_message, training_report

__all__ = ["HAPPENINGS", "Teller"]

_NODES: Final = ("n1", "n2", "n3", "n4")


@dataclass(slots=True)
class Teller:
    """Lets things happen in a world, at random."""

    world: World
    random: random.Random
    failures: int = 0
    """How often the application failed by itself."""
    deletions: int = 0
    """How often somebody deleted a pod, or the Job or JobSet of pods."""
    unseen: bool = False
    """Whether ends can have come that the operator did not see."""
    told: list[str] = field(default_factory=list)

    def alive(self) -> list[dict[str, Any]]:
        """List the pods whose trainers run: no silent kubelet has them, and nobody told them to end."""
        return [
            pod
            for pod in self.world.pods
            if pod["status"]["phase"] == "Running"
            and pod["spec"]["nodeName"] not in self.world.controllers.stuck
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def end_one(self, code: int, message: str = "") -> None:
        """End one of the running trainers."""
        if alive := self.alive():
            self.failures += code not in {0, ExitCode.SAVED}
            self.world.controllers.end_pod(self.random.choice(alive), code, message=message)


def a_trainer_fails(teller: Teller) -> None:
    teller.end_one(1)


def two_trainers_fail_at_once(teller: Teller) -> None:
    teller.end_one(1)
    teller.end_one(teller.random.choice([1, int(ExitCode.PEER_LOST)]))


def all_save_and_stop(teller: Teller) -> None:
    for pod in teller.alive():
        message = saved_message(sequence=7, step=1) if teller.random.random() < 0.5 else ""
        teller.world.controllers.end_pod(pod, int(ExitCode.SAVED), message=message)


def a_pod_is_evicted(teller: Teller) -> None:
    if alive := teller.alive():
        pod = teller.random.choice(alive)
        teller.world.controllers.disrupt(pod, "EvictionByEvictionAPI")
        if teller.random.random() < 0.5:
            teller.world.controllers.end_pod(pod, 143)


def a_machine_is_taken_back(teller: Teller) -> None:
    if alive := teller.alive():
        pod = teller.random.choice(alive)
        teller.world.controllers.disrupt(pod, "TerminationByKubelet")
        teller.world.controllers.end_pod(pod, int(ExitCode.SAVED))


def a_pod_is_deleted(teller: Teller) -> None:
    if alive := teller.alive():
        name = teller.random.choice(alive)["metadata"]["name"]
        teller.deletions += 1
        teller.world.cluster.mark_deleted("pods", "default", name, grace_s=30)


def a_job_is_deleted(teller: Teller) -> None:
    if jobs := teller.world.cluster.list_objects("jobs"):
        teller.deletions += 1
        teller.world.controllers.delete_job(teller.random.choice(jobs)["metadata"]["name"])


def the_jobset_is_deleted(teller: Teller) -> None:
    if teller.world.jobset is not None:
        teller.deletions += 1
        teller.world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)


def a_commit_is_reported(teller: Teller) -> None:
    checkpoint = teller.world.status.checkpoint
    known = 0 if checkpoint is None or checkpoint.latest is None else checkpoint.latest.sequence
    if teller.alive():
        teller.world.receive_report(training_report(sequence=known + 1, step=known + 1))


def the_job_is_suspended(teller: Teller) -> None:
    teller.world.edit(suspend=True)


def the_job_is_resumed(teller: Teller) -> None:
    teller.world.edit(suspend=False)


def the_image_is_changed(teller: Teller) -> None:
    container = {"name": "trainer", "image": f"trainer:{teller.random.randint(0, 2)}"}
    teller.world.edit(template={"spec": {"containers": [container]}})


def the_operator_is_restarted(teller: Teller) -> None:
    teller.unseen = True
    teller.world.restart_operator()


def the_operator_is_away(teller: Teller) -> None:
    teller.unseen = True
    teller.world.stop_operator()
    teller.world.controllers.sync()
    if teller.random.random() < 0.5:
        teller.random.choice([a_trainer_fails, a_pod_is_evicted, a_job_is_deleted])(teller)
        teller.world.now += teller.random.choice([1, 30])
        teller.world.controllers.sync()
    teller.world.restart_operator()


def watches_are_late(teller: Teller) -> None:
    teller.unseen = True
    teller.world.delay_watches(
        *teller.random.sample(["pods", "jobs", "jobsets"], teller.random.randint(1, 2))
    )


def watches_are_delivered(teller: Teller) -> None:
    teller.world.deliver_watches()


def a_node_is_lost(teller: Teller) -> None:
    if not teller.world.controllers.stuck:
        teller.world.lose_node(teller.random.choice(_NODES))


def half_a_minute_passes(teller: Teller) -> None:
    teller.world.now += 30


HAPPENINGS: Final[tuple[Callable[[Teller], None], ...]] = (
    a_trainer_fails,
    a_trainer_fails,
    two_trainers_fail_at_once,
    all_save_and_stop,
    a_pod_is_evicted,
    a_machine_is_taken_back,
    a_pod_is_deleted,
    a_job_is_deleted,
    the_jobset_is_deleted,
    a_commit_is_reported,
    a_commit_is_reported,
    the_job_is_suspended,
    the_job_is_resumed,
    the_job_is_resumed,
    the_image_is_changed,
    the_operator_is_restarted,
    the_operator_is_away,
    watches_are_late,
    watches_are_delivered,
    a_node_is_lost,
    half_a_minute_passes,
)
