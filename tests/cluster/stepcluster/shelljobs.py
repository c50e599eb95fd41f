"""Jobs on a cluster with the operator that run a few lines of shell in place of training, and what is seen of them."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepcluster.machine import is_passing

HOLD: Final = "until [ -e /tmp/go ]; do sleep 0.2; done"
"""Stands still until `ShellJob.release`. As a container's first process it ignores SIGTERM: its grace runs out."""

_IMAGE: Final = "localhost/busybox:1"
PATIENCE_S: Final = 240.0
"""Far more than anything here takes on an idle machine."""

_LOOK_AGAIN_S: Final = 0.3
_TOLD_CHARACTERS: Final = 4000
_JOBSET_NUMBER: Final = "stepkeeper.dev/jobset-number"
_JOBSET_UID: Final = "jobset.sigs.k8s.io/jobset-uid"
_RESTART: Final = "jobset.sigs.k8s.io/restart-attempt"


def container(name: str, script: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": _IMAGE, "command": ["sh", "-c", script], **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellJob:
    """A CheckpointedTrainingJob in a namespace of its own, both of one name, with a pod of these containers."""

    cluster: Cluster
    name: str
    containers: Sequence[Mapping[str, Any]]
    pod: Mapping[str, Any] = field(default_factory=dict)
    """More of the pod's spec."""

    n_hosts: int = 1
    max_failures: int = 3
    restarts: Mapping[str, Any] = field(default_factory=dict)
    """More of the job's spec.restarts."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the job itself."""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=stdin)

    def get(self, kind: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, *options, "-o", "json"))
        return found

    def status(self) -> dict[str, Any]:
        return dict(self.get("ctj", self.name).get("status") or {})

    def pods(self) -> list[dict[str, Any]]:
        return list(self.get("pods", "-l", f"stepkeeper.dev/job-name={self.name}")["items"])

    def jobset_uid(self) -> str:
        """Return the uid of the JobSet of that name; empty if there is none."""
        return self.kubectl(
            "get", "jobset", self.name, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"
        )

    def release(self) -> None:
        """Let the script of every running pod go on after HOLD."""
        for pod in self.pods():
            if pod["status"]["phase"] == "Running":
                self._touch_go(pod["metadata"]["name"])

    def finish(self) -> dict[str, Any]:
        """Let the training end by itself."""
        self.release()
        return self.until_phase("Complete")

    def _touch_go(self, pod_name: str) -> None:
        try:
            self.kubectl("exec", pod_name, "-c", "trainer", "--", "touch", "/tmp/go")
        except CommandError:
            # A container that ends kills what runs in it: it may have seen the file before `touch` was over.
            ended = (
                '--for=jsonpath={.status.containerStatuses[?(@.name=="trainer")].state.terminated.finishedAt}'
            )
            self.kubectl("wait", f"pod/{pod_name}", ended, "--timeout=100s")

    def until(
        self,
        is_so: Callable[[dict[str, Any]], bool],
        *,
        timeout_s: float = PATIENCE_S,
    ) -> dict[str, Any]:
        """Wait for a status that fulfils `is_so`, and return it.

        Raises:
            AssertionError: None did in time; the message holds the last status, and what `describe` says.

        """
        return until_status(self.status, is_so, timeout_s, seen=lambda: f"of {self.name}\n{self.describe()}")

    def describe(self) -> str:
        """Return its pods, the newest events of its namespace and the ends of its pods' logs, for a message."""
        selector = ("-l", f"stepkeeper.dev/job-name={self.name}")
        said = []
        for command in (
            ("get", "pods", *selector, "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", *selector, "--all-containers", "--prefix", "--tail=20"),
        ):
            try:
                text = self.kubectl(*command)
            except CommandError as error:
                text = str(error)
            said.append(f"$ kubectl {' '.join(command)}\n{text[-_TOLD_CHARACTERS:]}")
        return "\n".join(said)

    def until_phase(self, phase: str, *, attempt: int = 0) -> dict[str, Any]:
        """Wait for the phase, in that attempt if one is given, and return the status."""

        def is_so(status: dict[str, Any]) -> bool:
            if status.get("phase") != phase:
                return False
            return attempt == 0 or [entry["number"] for entry in status["attempts"]][-1:] == [attempt]

        return self.until(is_so)

    def manifest(self) -> dict[str, Any]:
        spec = {"terminationGracePeriodSeconds": 2, **self.pod, "containers": list(self.containers)}
        return {
            "apiVersion": "stepkeeper.dev/v1alpha1",
            "kind": "CheckpointedTrainingJob",
            "metadata": {"name": self.name, "namespace": self.name, "labels": dict(self.labels)},
            "spec": {
                "placement": {"hosts": {"count": self.n_hosts}},
                "checkpoint": {"uri": "file:///nowhere", "interval": {"every": {"steps": 1}}},
                "restarts": {
                    "maxFailures": self.max_failures,
                    "backoff": {"initialSeconds": 1, "maxSeconds": 1},
                    **self.restarts,
                },
                "template": {"spec": spec},
            },
        }


def until(
    is_so: Callable[[], object], timeout_s: float = PATIENCE_S, *, seen: Callable[[], str] = str
) -> None:
    """Wait until it is so. An API server that gives no answer in time tells nothing, and is asked again.

    Raises:
        AssertionError: It wasn't in time; the message holds what was `seen` instead.

    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if is_so():
                return
        except CommandError as error:
            if not is_passing(error):
                raise
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {seen()}"
        time.sleep(_LOOK_AGAIN_S)


def until_status(
    read: Callable[[], dict[str, Any]],
    is_so: Callable[[dict[str, Any]], object],
    timeout_s: float,
    *,
    seen: Callable[[], str],
) -> dict[str, Any]:
    status: dict[str, Any] = {}

    def look() -> object:
        status.clear()
        status.update(read())
        return is_so(status)

    until(look, timeout_s, seen=lambda: f"{json.dumps(status, indent=1)} {seen()}")
    return status


def causes(status: Mapping[str, Any]) -> list[str | None]:
    return [attempt.get("cause") for attempt in status["attempts"]]


def condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of that type; empty as long as there is none."""
    return next((dict(item) for item in status.get("conditions", ()) if item["type"] == kind), {})


def apply_all(cluster: Cluster, jobs: Sequence[ShellJob], *others: Mapping[str, Any]) -> None:
    """Apply the jobs, each in its namespace, after the other objects, which may be in any of these namespaces."""
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.name}} for job in jobs]
    _with_all(cluster, "apply", namespaces)
    for job in jobs:
        # Every namespace gets one, a moment later; until then its pods are refused.
        job.kubectl("wait", "serviceaccount/default", "--for=create", "--timeout=110s")
    if others:
        _with_all(cluster, "apply", others)
    _with_all(cluster, "apply", [job.manifest() for job in jobs])


def delete_all(cluster: Cluster, jobs: Sequence[ShellJob]) -> None:
    """Delete the jobs, then their namespaces: in a namespace that is being deleted no job can be brought to rest."""
    _with_all(cluster, "delete", [job.manifest() for job in jobs], "--ignore-not-found")
    names = (job.name for job in jobs)
    cluster.kubectl("delete", "namespace", *names, "--ignore-not-found", "--timeout=100s")


def _with_all(cluster: Cluster, verb: str, items: Sequence[Mapping[str, Any]], *options: str) -> None:
    body = {"apiVersion": "v1", "kind": "List", "items": list(items)}
    cluster.kubectl(verb, *options, "-f", "-", stdin=json.dumps(body))


@dataclass(slots=True)
class Gangs:
    """The starts of a job of one slice whose pods were seen, and whether pods of two of them were there at once."""

    seen: list[tuple[int, int]] = field(default_factory=list)
    """Number of the JobSet and of its restart, for every Job that had pods, in the order of their first."""

    together: list[tuple[int, int]] = field(default_factory=list)
    """The starts whose pods could run at the same time; empty: never more than one."""

    trainers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """End of each pod's trainer, by the pod's name: the API's ContainerStateTerminated."""

    _starts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the Job's uid."""

    _live: dict[str, str] = field(default_factory=dict)
    """The Job's uid, by the uid of each pod that may run."""

    _jobsets: set[str] = field(default_factory=set)
    """The uids of those whose pods were seen."""

    _deleted: set[str] = field(default_factory=set)

    def jobset_is_deleted(self) -> None:
        """Hear that the JobSet is about to be deleted: a Job that its controller yet makes anew is no start.

        The controller may hear that a Job is gone before it hears that the JobSet goes.
        """
        self._deleted |= self._jobsets

    def relisted(self) -> None:
        """Start over: a new watch begins with all pods that there are."""
        self._live.clear()

    def saw(self, event: Mapping[str, Any]) -> None:
        meta, status = event["object"]["metadata"], event["object"].get("status", {})
        labels, owners = meta.get("labels") or {}, meta.get("ownerReferences") or ()
        if _JOBSET_NUMBER not in labels or not owners:
            return
        for part in status.get("containerStatuses") or ():
            if part["name"] == "trainer" and "terminated" in part["state"]:
                self.trainers[meta["name"]] = part["state"]["terminated"]
        if event["type"] == "DELETED" or status.get("phase") in {"Failed", "Succeeded"}:
            self._live.pop(meta["uid"], None)
            return
        job_uid, jobset_uid = owners[0]["uid"], labels[_JOBSET_UID]
        if job_uid not in self._starts:
            if jobset_uid in self._deleted:
                return
            self._jobsets.add(jobset_uid)
            self._starts[job_uid] = (int(labels[_JOBSET_NUMBER]), int(labels[_RESTART]))
            self.seen.append(self._starts[job_uid])
        self._live[meta["uid"]] = job_uid
        live = set(self._live.values())
        if len(live) > 1 and not self.together:
            self.together = sorted(self._starts[uid] for uid in live)


@contextlib.contextmanager
def watch_gangs(job: ShellJob) -> Iterator[Gangs]:
    """Watches the pods of the job's namespace, also over restarts of the API server."""
    gangs, stop = Gangs(), threading.Event()
    running: list[subprocess.Popen[str]] = []
    command = ["kubectl", "get", "--raw", f"/api/v1/namespaces/{job.name}/pods?watch=true"]
    environment = os.environ | job.cluster.environment

    def follow() -> None:
        while not stop.wait(_LOOK_AGAIN_S):
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                running[:] = [process]
                gangs.relisted()
                assert process.stdout is not None
                for line in process.stdout:
                    try:
                        gangs.saw(json.loads(line))
                    except json.JSONDecodeError:
                        break  # the API server died in the middle of a line

    thread = threading.Thread(target=follow, name=f"watch-{job.name}", daemon=True)
    thread.start()
    try:
        yield gangs
    finally:
        stop.set()
        while thread.is_alive():
            for process in running:
                process.terminate()
            thread.join(_LOOK_AGAIN_S)
