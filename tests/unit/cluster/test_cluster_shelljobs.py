"""Test how jobs of shell scripts are told to go on."""

import json
from collections.abc import Callable
from typing import cast

import pytest

from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepcluster.shelljobs import HOLD, ShellJob, container

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
