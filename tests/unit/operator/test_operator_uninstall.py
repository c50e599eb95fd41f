"""Test the check that keeps an uninstallation from leaving machines in the cloud."""

import io
import os
from typing import Any

import pytest

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.__main__ import main
from stepkeeper_operator.cloud_tpu.naming import FINALIZER
from stepkeeper_operator.errors import ApiError
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


async def test_what_is_to_stay_in_the_cloud_could_not_be_deleted_without_the_operator(
    cluster: FakeCluster,
) -> None:
    add(cluster, "kept", policy="Retain", finalizer=True, state="Active")
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert "ml/kept: nothing in the cloud is known yet (Active, deletionPolicy Retain)" in text
    for remedy in ("kubectl delete qr --namespace ml kept", "spec.deletionPolicy: Retain", "--no-hooks"):
        assert remedy in text
    add(cluster, "v5e", finalizer=True)
    cluster.mark_deleted("queuedresources", "ml", "v5e", grace_s=0)
    text = (await check(cluster))[1]
    assert "ml/v5e: nothing in the cloud is known yet (being deleted, deletionPolicy Delete)" in text
    assert "ml/kept:" in text


async def test_a_resource_that_would_be_left_is_named_with_what_to_do(cluster: FakeCluster) -> None:
    add(cluster, "kept", policy="Retain")
    assert await check(cluster) == (0, "")
    name = "projects/p/locations/us-west4-a/queuedResources/ml-v5e"
    add(cluster, "v5e", state="Active", cloudName=name)
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert text.startswith("1 QueuedResource needs the operator")
    assert f"ml/v5e: {name} (Active, deletionPolicy Delete)" in text
    for remedy in ("kubectl delete qr --namespace ml v5e", "spec.deletionPolicy: Retain", "--no-hooks"):
        assert remedy in text
    assert "kept" not in text


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall"]) == os.EX_USAGE
    assert "[check-uninstall]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "ends_with"), [(404, 0), (0, os.EX_TEMPFAIL), (403, os.EX_TEMPFAIL), (500, os.EX_TEMPFAIL)]
)
async def test_what_can_not_be_listed_is_no_obstacle_only_if_there_is_no_crd(
    cluster: FakeCluster, status: int, ends_with: int
) -> None:
    cluster.refusals["list", "queuedresources"] = ApiError(status, "no answer")
    ended, text = await check(cluster)
    assert ended == ends_with
    assert ("no answer" in text) is (ends_with != 0)


async def test_the_message_stays_short(cluster: FakeCluster) -> None:
    for number in range(200):
        add(cluster, f"v5e-{number}")
    text = (await check(cluster))[1]
    assert "and 180 more" in text
    assert len(text.splitlines()) < 30
