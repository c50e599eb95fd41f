"""Let things happen to a job at random, and count what was done: the properties compare the status with that."""

import random
from dataclasses import dataclass, field
from typing import Any

from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, Report

__all__ = ["Teller"]


@dataclass(slots=True)
class Teller:
    """Lets things happen in a world, at random."""

    world: World
    random: random.Random
    spec: dict[str, Any]
    """The spec that the job began with."""
    failures: int = 0
    """How often the application failed by itself."""
    deletions: int = 0
    """How often somebody deleted a pod, or the Job or JobSet of pods."""
    unseen: bool = False
    """Whether ends can have come that the operator did not see."""
    done: dict[str, float] = field(default_factory=dict)
    """When pods exited 0 by themselves, by their uids."""
    moved_at: float = 0.0
    """When a report last showed another step, or a new commit."""
    step: int = 0
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

    def end_one(self, code: int, message: str = "") -> None:
        """End one of the running trainers."""
        if alive := self.alive():
            pod = self.random.choice(alive)
            self.failures += code not in {0, ExitCode.SAVED}
            if code == 0:
                self.done[pod["metadata"]["uid"]] = self.world.now
            self.world.controllers.end_pod(pod, code, message=message)

    def report(self, *, steps: int = 0, commits: bool = False, after_s: float = 0.0) -> None:
        """Report so many steps more, from one of the pods that run."""
        checkpoint = self.world.status.checkpoint
        known = 0 if checkpoint is None or checkpoint.latest is None else checkpoint.latest.sequence
        self.world.now += after_s
        self.step += steps
        if steps or commits:
            self.moved_at = self.world.now
        if commits:
            self._receive(training_report(known + 1, self.step))
        else:
            self._receive(training_report(known, self.step, commits=(), head=None, root=None))

    def _receive(self, report: Report) -> None:
        present = [pod for pod in self.world.pods if "deletionTimestamp" not in pod["metadata"]]
        ranks = [rank for rank, pod in enumerate(present) if pod in self.alive()]
        if ranks:
            self.world.receive_report(report, rank=ranks[0])
