"""Test the check that keeps an uninstallation from leaving machines in the cloud."""

import io
import os
from typing import Any

import pytest

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.__main__ import main
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.queued_resources.naming import FINALIZER
from stepkeeper_operator.queued_resources.uninstall import OBSTACLE, check_uninstall


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(lambda: 0.0)


def add(
    cluster: FakeCluster, name: str, *, policy: str = "Delete", finalizer: bool = False, **status: str
) -> None:
    meta: dict[str, Any] = {"namespace": "ml", "name": name}
    if finalizer:
        meta["finalizers"] = [FINALIZER]
    cluster.put("queuedresources", {"metadata": meta, "spec": {"deletionPolicy": policy}, "status": status})


async def check(cluster: FakeCluster) -> tuple[int, str]:
    output = io.StringIO()
    return await check_uninstall(cluster, output), output.getvalue()


async def test_nothing_speaks_against_it_where_there_are_none(cluster: FakeCluster) -> None:
    assert await check(cluster) == (0, "")


async def test_what_is_to_stay_and_can_go_without_the_operator_does_not_speak_against_it(
    cluster: FakeCluster,
) -> None:
    add(cluster, "kept", policy="Retain")
    assert await check(cluster) == (0, "")


async def test_what_is_to_stay_in_the_cloud_could_not_be_deleted_without_the_operator(
    cluster: FakeCluster,
) -> None:
    add(cluster, "kept", policy="Retain", finalizer=True, state="Active")
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert "1 QueuedResource has a finalizer" in text
    assert "  ml/kept: nothing in the cloud is known yet (Active)\n" in text
    assert "kubectl delete qr --namespace ml kept" in text
    assert "Machines stay where spec.deletionPolicy is Retain" in text
    assert "--no-hooks" in text
    assert "go on to cost" not in text


async def test_both_kinds_are_named_apart(cluster: FakeCluster) -> None:
    add(cluster, "kept", policy="Retain", finalizer=True)
    add(cluster, "v5e", finalizer=True)
    text = (await check(cluster))[1]
    costly, stuck = (
        text.index("1 QueuedResource has machines"),
        text.index("1 QueuedResource has a finalizer"),
    )
    assert costly < text.index("ml/v5e:") < stuck < text.index("ml/kept:")


async def test_a_resource_that_would_be_left_is_named_with_what_to_do(cluster: FakeCluster) -> None:
    add(cluster, "kept", policy="Retain")
    name = "projects/p/locations/us-west4-a/queuedResources/ml-v5e"
    add(cluster, "v5e", state="Active", cloudName=name)
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert "1 QueuedResource has machines in the cloud" in text
    assert f"  ml/v5e: {name} (Active)\n" in text
    assert "kubectl delete qr --namespace ml v5e" in text
    assert "spec.deletionPolicy is Retain" in text
    assert "--no-hooks" in text
    assert "kept" not in text


async def test_one_that_is_being_deleted_still_has_to_go(cluster: FakeCluster) -> None:
    add(cluster, "v5e")
    cluster.mark_deleted("queuedresources", "ml", "v5e", grace_s=0)
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert "ml/v5e: nothing in the cloud is known yet (being deleted)" in text


async def test_the_default_is_to_delete(cluster: FakeCluster) -> None:
    cluster.put("queuedresources", {"metadata": {"namespace": "ml", "name": "v5e"}, "spec": {}})
    assert (await check(cluster))[0] == OBSTACLE


async def test_the_message_stays_short(cluster: FakeCluster) -> None:
    for number in range(200):
        add(cluster, f"v5e-{number}")
    text = (await check(cluster))[1]
    assert "200 QueuedResources have" in text
    assert "and 180 more" in text
    assert len(text.splitlines()) < 30


async def test_without_the_crd_there_are_none(cluster: FakeCluster) -> None:
    cluster.refusals["list", "queuedresources"] = ApiError(404, "the server could not find the resource")
    assert await check(cluster) == (0, "")


@pytest.mark.parametrize("status", [0, 403, 500])
async def test_while_nobody_can_tell_it_is_refused_for_now(cluster: FakeCluster, status: int) -> None:
    cluster.refusals["list", "queuedresources"] = ApiError(status, "no answer")
    assert await check(cluster) == (
        os.EX_TEMPFAIL,
        "cannot see whether there are QueuedResources: no answer\n",
    )


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall"]) == os.EX_USAGE
    assert "[check-uninstall]" in capsys.readouterr().err
