"""Everything that is to be seen of a job from outside, as one queue of events.

The job's status and its pods come from the API server, what a trainer prints from its pod's log, commits from the
log in object storage: status is only its mirror.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from demo.kubectl import Kubectl, KubectlError
from stepkeeper.errors import TransientStorageError
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store

__all__ = [
    "Event",
    "LogGrew",
    "PodStarted",
    "Source",
    "StatusChanged",
    "StepPrinted",
    "Watch",
    "watch_json",
]

_LOG_POLL_S = 0.3
_AGAIN_S = 0.5
_FOLLOW_AGAIN_S = 2.0
_STEP = re.compile(r"step=(\d+) epoch=(\d+) loss=(\S+) exact=(\S+)")
_HAS_RUN = ("Running", "Succeeded", "Failed")
_POD_COLUMNS = "{.metadata.name} {.spec.nodeName} {.status.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_s: float
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanged(Event):
    """The job's."""

    status: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStarted(Event):
    pod: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrinted(Event):
    """Its time is when the container printed it, by the kubelet."""

    pod: str
    step: int
    epoch: int
    loss: float
    exact: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGrew(Event):
    state: LogState


Source = Callable[[Kubectl], Iterator[Event]]
"""Yields what one watch sees, until it ends."""


class Watch:
    """Within its block, threads put what they see into `events`.

    Args:
        kubectl: What they see it by.
        job: Name of the job.
        uri: The root where it saves.
        more: What else is seen.

    """

    def __init__(self, kubectl: Kubectl, *, job: str, uri: str, more: Sequence[Source] = ()) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._kubectl = kubectl
        self._job = job
        self._uri = uri
        self._sources = (self._watch_status, self._watch_pods, *more)
        self._seen_pods: set[str] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for source in self._sources:
            self._start(self._again_and_again, source)
        self._start(self._watch_log)
        return self

    def __exit__(self, *_: object) -> None:
        self._kubectl.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _again_and_again(self, source: Source) -> None:
        # A watch ends now and then; the next one begins by listing the present state.
        while not self._kubectl.closed:
            for event in source(self._kubectl):
                self.events.put(event)
            time.sleep(_AGAIN_S)

    def _watch_status(self, kubectl: Kubectl) -> Iterator[Event]:
        for status in watch_json(kubectl, "ctj", self._job, "{.status}"):
            yield StatusChanged(at_s=time.time(), status=status)

    def _watch_pods(self, kubectl: Kubectl) -> Iterator[Event]:
        selector = f"stepkeeper.dev/job-name={self._job}"
        words = ("get", "pods", "-l", selector, "--watch", "-o", f'jsonpath={_POD_COLUMNS}{{"\\n"}}')
        for line in kubectl.lines(*words):
            name, _, rest = line.strip().partition(" ")
            node, _, phase = rest.partition(" ")
            if phase not in _HAS_RUN or name in self._seen_pods:
                continue
            self._seen_pods.add(name)
            yield PodStarted(at_s=time.time(), pod=name, node=node)
            self._start(self._follow, name)

    def _follow(self, pod: str) -> None:
        last, has_ended = 0, False
        # A pod's log may end before the pod does: its kubelet doesn't answer yet, or the API server goes.
        while not (has_ended or self._kubectl.closed):
            has_ended = self._has_ended(pod)
            for line in self._kubectl.lines("logs", "--follow", "--timestamps", pod, "-c", "trainer"):
                stamp, _, text = line.partition(" ")
                found = _STEP.match(text)
                if found and int(found[1]) > last:
                    last = int(found[1])
                    self.events.put(_read_step(pod, stamp, found))
            if not has_ended:
                time.sleep(_FOLLOW_AGAIN_S)

    def _has_ended(self, pod: str) -> bool:
        words = ("get", "pod", pod, "--ignore-not-found", "-o", "jsonpath={.status.phase}")
        try:
            return self._kubectl.run(*words) in {"", "Failed", "Succeeded"}
        except KubectlError:
            return False

    def _watch_log(self) -> None:
        store = open_store(self._uri)
        log = Log(store)
        tail = -1
        while not self._kubectl.closed:
            try:
                state = log.refresh()
            except TransientStorageError:
                time.sleep(_AGAIN_S)
                continue
            if state.tail > tail:
                tail = state.tail
                self.events.put(LogGrew(at_s=time.time(), state=state))
            time.sleep(_LOG_POLL_S)
        store.close()


def watch_json(kubectl: Kubectl, *selection: str) -> Iterator[Any]:
    """Yield a part of objects, itself an object and the last of the words, each time one of them changes.

    A watch that breaks ends with an object of another kind, which has the reason: its `.status` is a word, "Failure".
    """
    *words, part = selection
    for line in kubectl.lines("get", *words, "--watch", "-o", f'jsonpath={part}{{"\\n"}}'):
        if line.startswith("{"):
            yield json.loads(line)


def _read_step(pod: str, stamp: str, found: re.Match[str]) -> StepPrinted:
    step, epoch, loss, exact = found.groups()
    return StepPrinted(
        at_s=unix_s(stamp), pod=pod, step=int(step), epoch=int(epoch), loss=float(loss), exact=exact
    )


def unix_s(stamp: str) -> float:
    """Convert the time that a kubelet wrote before a line. It has nanoseconds, without zeros at their end."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
