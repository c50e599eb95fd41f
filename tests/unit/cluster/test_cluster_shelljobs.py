"""Test how jobs of shell scripts are told to go on, and what is seen of their starts."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepcluster.shelljobs import HOLD, Gangs, ShellJob, container, until

KILLED = CommandError("`kubectl exec` ended with 137")


class FakeKubectl:
    """Answers as a cluster whose one pod runs does, but to `exec` and `wait`."""

    def __init__(self, *, wait: Callable[[], str]) -> None:
        self.verbs: list[str] = []
        self._wait = wait

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        assert stdin is None
        verb = arguments[2]
        self.verbs.append(verb)
        if verb == "get":
            return json.dumps({"items": [{"metadata": {"name": "p"}, "status": {"phase": "Running"}}]})
        if verb == "exec":
            raise KILLED
        return self._wait()


def job(cluster: FakeKubectl) -> ShellJob:
    return ShellJob(cluster=cast(Cluster, cluster), name="j", containers=[container("trainer", HOLD)])


def test_a_trainer_that_goes_on_and_ends_before_its_touch_is_over_was_released() -> None:
    cluster = FakeKubectl(wait=lambda: "pod/p condition met")
    job(cluster).release()
    assert cluster.verbs == ["get", "exec", "wait"]


def test_a_trainer_that_could_not_be_told_and_stands_still_is_an_error() -> None:
    def time_out() -> str:
        raise CommandError("timed out waiting for the condition")

    with pytest.raises(CommandError, match="timed out"):
        job(FakeKubectl(wait=time_out)).release()


def test_a_job_that_does_not_come_so_far_is_described() -> None:
    class Stuck:
        """A cluster with one pod that says nothing yet."""

        def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
            assert stdin is None
            match arguments[2:4]:
                case ("get", "ctj"):
                    return json.dumps({"status": {"phase": "Starting"}})
                case ("get", "pods"):
                    return "p-0   0/1   ContainerCreating   tpu-0"
                case ("get", "events"):
                    return "FailedMount pod/p-0"
                case _:
                    raise CommandError("container trainer is waiting to start")

    stuck = ShellJob(cluster=cast(Cluster, Stuck()), name="j", containers=[container("trainer", HOLD)])
    with pytest.raises(AssertionError) as raised:
        stuck.until(lambda status: status.get("phase") == "Running", timeout_s=0)
    told = str(raised.value)
    for part in ("Starting", "ContainerCreating", "FailedMount", "waiting to start"):
        assert part in told


@pytest.mark.parametrize(
    "said", ["Unable to connect to the server: net/http: TLS handshake timeout", "connection refused"]
)
def test_an_api_server_that_gives_no_answer_is_asked_again(said: str) -> None:
    answers: list[str | CommandError] = [CommandError(said), json.dumps({"status": {"phase": "Running"}})]

    class Slow:
        def kubectl(self, *_: str, stdin: str | None = None) -> str:
            assert stdin is None
            answer = answers.pop(0)
            if isinstance(answer, CommandError):
                raise answer
            return answer

    slow = ShellJob(cluster=cast(Cluster, Slow()), name="j", containers=[container("trainer", HOLD)])
    assert slow.until_phase("Running") == {"phase": "Running"}
    answers.append(CommandError('checkpointedtrainingjobs "j" not found'))
    with pytest.raises(CommandError, match="not found"):
        slow.until_phase("Running")


def pod_event(
    job: str, pod: str, kind: str = "ADDED", *, jobset: str = "a", start: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    number, restart = start
    labels = {
        "stepkeeper.dev/jobset-number": f"{number}",
        "jobset.sigs.k8s.io/restart-attempt": f"{restart}",
        "jobset.sigs.k8s.io/jobset-uid": jobset,
    }
    meta = {"name": pod, "uid": pod, "labels": labels, "ownerReferences": [{"uid": job}]}
    return {"type": kind, "object": {"metadata": meta, "status": {"phase": "Running"}}}


def test_pods_of_two_starts_at_once_are_found() -> None:
    gangs = Gangs()
    gangs.saw(pod_event("first", "p-0"))
    gangs.saw(pod_event("second", "q-0", start=(0, 1)))
    assert (gangs.seen, gangs.together) == ([(0, 0), (0, 1)], [(0, 0), (0, 1)])


def test_a_job_that_a_living_jobset_makes_anew_beside_its_old_pods_is_found() -> None:
    gangs = Gangs()
    gangs.saw(pod_event("first", "p-0"))
    gangs.saw(pod_event("again", "q-0"))
    assert (gangs.seen, gangs.together) == ([(0, 0), (0, 0)], [(0, 0), (0, 0)])


def test_a_job_that_a_deleted_jobset_makes_anew_is_no_start() -> None:
    gangs = Gangs()
    gangs.saw(pod_event("first", "p-0"))
    gangs.jobset_is_deleted()
    gangs.saw(pod_event("again", "q-0"))
    gangs.saw(pod_event("first", "p-0", "DELETED"))
    gangs.saw(pod_event("next", "r-0", jobset="b"))
    assert (gangs.seen, gangs.together) == ([(0, 0), (0, 0)], [])


def test_the_next_jobset_beside_pods_of_the_deleted_one_is_found() -> None:
    gangs = Gangs()
    gangs.saw(pod_event("first", "p-0"))
    gangs.jobset_is_deleted()
    gangs.saw(pod_event("next", "q-0", jobset="b", start=(1, 0)))
    assert gangs.together == [(0, 0), (1, 0)]


def test_what_is_waited_for_is_looked_at_again_while_the_api_server_is_away() -> None:
    answers: list[bool | CommandError] = [CommandError("connection refused"), False, True]

    def look() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    until(look)
    assert not answers
    with pytest.raises(AssertionError, match="not within 0 s"):
        until(lambda: False, 0)
