"""README's job and the examples on several hosts, as their users start them: told together, and gone on exactly.

They run side by side on a slice of four hosts: README's script on all four; examples/ddp under torchrun and
examples/fsdp2 on two each, of which one is preempted, with README's; and examples/fsdp2 once more on two, of which the
cloud maintains one.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import torch
from stories import Story, applied, build_images, example_story, maintained_story, readme_story
from undisturbed_runs import Undisturbed, losses_of, model_of

from stepcluster.api import Cluster, cluster_up
from stepcluster.product import install_operator
from stepkeeper.contract import ExitCode
from stepkeeper_testing.metadata_server import FakeMetadataServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

MAINTENANCE_S = 60.0
"""From the announcement to the maintenance, as Compute Engine has it."""

Status = Mapping[str, Any]


@pytest.fixture(scope="module")
def slice_of_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose TPU nodes are the four hosts of a 4x4 slice of v5e, with the operator and all images."""
    archives = build_images(tmp_path_factory.mktemp("images"))
    with cluster_up(f"slice-{os.getpid()}", n_tpu_nodes=4, topology="4x4") as cluster:
        with ThreadPoolExecutor(1) as executor:
            loaded = executor.map(partial(cluster.load_image, nodes=cluster.tpu_nodes), archives)
            install_operator(cluster, reportIntervalSeconds=2, progressIntervalSeconds=2)
            list(loaded)
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of all jobs while they ran."""

    stories: Mapping[str, Story]
    resumed: Mapping[str, Status]
    """By job: its status when it trained again."""

    fewer: Mapping[str, Status]
    """By job: its status when it trained on fewer workers."""

    saved_ahead: int
    """The step that was saved for the maintenance, before that came."""

    at_maintenance: Status
    """The status of the maintained job when the maintenance came."""

    last: Mapping[str, int]
    """By job: the last step that is saved."""


@pytest.fixture(scope="module")
def seen(slice_of_four: Cluster) -> Iterator[Seen]:
    cluster = slice_of_four
    first, second, third, fourth = cluster.tpu_nodes
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("STORAGE_EMULATOR_HOST", cluster.gcs_url)
        metadata = stack.enter_context(metadata_server(cluster))
        stories = [
            readme_story(cluster),
            example_story(cluster, "ddp", (first, second)),
            example_story(cluster, "fsdp2", (first, third)),
            maintained_story(cluster, (second, fourth), metadata_host=metadata.host),
        ]
        stack.enter_context(applied(cluster, stories))
        yield let_all_happen({story.name: story for story in stories}, metadata)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    with closing(Undisturbed(tmp_path_factory.mktemp("undisturbed"))) as runs:
        yield runs


def metadata_server(cluster: Cluster) -> FakeMetadataServer:
    server = FakeMetadataServer(
        values={"preempted": "FALSE", "maintenance-event": "NONE", "upcoming-maintenance": "{}"},
        address=cluster.host_address,
    )
    server.failing = 3
    return server


def let_all_happen(stories: Mapping[str, Story], metadata: FakeMetadataServer) -> Seen:
    readmes, ddp, fsdp2, maintained = stories.values()
    faults, (preempted, _, _, ends_later) = readmes.cluster.faults, readmes.cluster.tpu_nodes
    for story in stories.values():
        story.until_trains(attempt=1)
    faults.spot_preemption(preempted, back_after_s=2)
    resumed = {story.name: story.until_trains(attempt=2) for story in (readmes, ddp, fsdp2)}
    last = {readmes.name: readmes.end()}
    with ThreadPoolExecutor() as executor:
        maintenance = executor.submit(maintain, maintained, metadata, ends_later)
        use_one_process_per_pod(ddp)
        fsdp2.patch_spec(placement={"hosts": {"count": 1}})
        fewer = {story.name: story.until_trains(attempt=3) for story in (ddp, fsdp2)}
        saved_ahead, at_maintenance = maintenance.result()
    resumed[maintained.name] = maintained.until_trains(attempt=2)
    with ThreadPoolExecutor() as executor:
        others = (ddp, fsdp2, maintained)
        last |= zip((story.name for story in others), executor.map(Story.end, others), strict=True)
    return Seen(
        stories=stories,
        resumed=resumed,
        fewer=fewer,
        saved_ahead=saved_ahead,
        at_maintenance=at_maintenance,
        last=last,
    )


def maintain(story: Story, metadata: FakeMetadataServer, node: str) -> tuple[int, Status]:
    """Announce maintenance, and let it come.

    Returns:
        The step that is saved when it comes, and the job's status then.

    """
    comes_s = time.time() + MAINTENANCE_S
    begins = datetime.fromtimestamp(comes_s, UTC).isoformat()
    metadata.set("upcoming-maintenance", json.dumps({"type": "SCHEDULED", "window_start_time": begins}))
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    time.sleep(comes_s - time.time())
    saved, status = story.read_log().latest, story.status()
    assert saved is not None, "it was saved ahead"
    story.cluster.faults.spot_preemption(node, back_after_s=2, delete_node=False)
    return saved.step, status


def use_one_process_per_pod(ddp: Story) -> None:
    template = ddp.manifest()["spec"]["template"]
    (trainer,) = template["spec"]["containers"]
    assert "--nproc-per-node=2" in trainer["args"]
    args = [arg.replace("per-node=2", "per-node=1") for arg in trainer["args"]]
    containers = [{**trainer, "args": args}]
    ddp.patch_spec(template={**template, "spec": {**template["spec"], "containers": containers}})


def check_disruption(seen: Seen, name: str, *, n_pods: int, cause: str = "SpotPreemption") -> int:
    """All pods saved one step and said so, the restart was in place and costs nothing; returns that step."""
    ends = seen.stories[name].first_ends()
    (step,) = {word.step for _, word in ends}
    assert step is not None
    assert [word.code for _, word in ends] == [ExitCode.SAVED] * n_pods
    # On a busy machine, the one whose power goes may not have come to its end, after its last word.
    assert [code for code, _ in ends].count(ExitCode.SAVED) >= n_pods - 1
    first, second = seen.resumed[name]["attempts"]
    assert (first["cause"], second["fromStep"]) == (cause, step)
    assert seen.resumed[name]["restarts"]["byCause"] == [
        {"cause": cause, "count": 1, "countedTowardsLimit": 0}
    ]
    (gangs,) = seen.stories[name].gangs
    assert gangs.seen[:2] == [(0, 0), (0, 1)], "JobSet has started the pods anew by itself"
    assert gangs.together == []
    return step


def check_fewer_workers(seen: Seen, undisturbed: Undisturbed, name: str, *, n_before: int) -> None:
    """The job's user changes the number of its workers: it goes on where it was, and all was exact until then."""
    edited, resumed = seen.fewer[name]["attempts"][1:]
    stopped = resumed["fromStep"]
    assert edited["cause"] == "Requested"
    assert stopped >= edited["toStep"] > edited["fromStep"], "the edit has it save before it stops"
    losses = undisturbed.train_example(name, n_processes=n_before, n_steps=stopped)
    story, last = seen.stories[name], seen.last[name]
    more = losses_of(story.uri, last)
    assert len(more) == last > stopped
    assert more[:stopped] == losses


def test_readmes_manifest_and_script_work_together_as_they_stand(
    seen: Seen, undisturbed: Undisturbed
) -> None:
    saved, last = check_disruption(seen, "llm", n_pods=4), seen.last["llm"]
    assert last > saved
    exact = undisturbed.train_readmes_model(n_processes=4, n_steps=last)
    model = model_of(seen.stories["llm"].uri, last, exact)
    assert [name for name in model if not torch.equal(model[name], exact[name])] == []


def test_ddp_under_torchrun_of_two_workers_in_each_pod(seen: Seen, undisturbed: Undisturbed) -> None:
    check_disruption(seen, "ddp", n_pods=2)
    check_fewer_workers(seen, undisturbed, "ddp", n_before=4)


def test_fsdp2_on_two_pods(seen: Seen, undisturbed: Undisturbed) -> None:
    check_disruption(seen, "fsdp2", n_pods=2)
    check_fewer_workers(seen, undisturbed, "fsdp2", n_before=2)


def test_a_maintenance_is_saved_for_ahead_and_trained_on_until_it_comes(
    seen: Seen, undisturbed: Undisturbed
) -> None:
    at_maintenance, last = seen.at_maintenance, seen.last["maintained"]
    assert [attempt["number"] for attempt in at_maintenance["attempts"]] == [1]
    assert seen.saved_ahead < at_maintenance["progress"]["step"], "training goes on until it comes"
    stopped = check_disruption(seen, "maintained", n_pods=2, cause="Maintenance")
    assert seen.saved_ahead < stopped < last
    losses = undisturbed.train_example("fsdp2", n_processes=2, n_steps=last)
    assert losses_of(seen.stories["maintained"].uri, last) == losses
