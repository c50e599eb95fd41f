"""Test over random delays that of objects whose annotations name the same machines one has them in the end."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count, cycle
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from fake_cluster.queued_resources import PLACE, make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, Place
from stepkeeper_operator.queued_resources.naming import UID_LABEL
from tpuapi.cloud import FakeCloud

TICK_S = 5.0
N_TICKS = 80
N_TURNS = 30
"""Turns of the event loop in which every reconcile that needs no more time ends."""


class SlowCloud:
    """The same cloud, in which a label takes its time between the look at the node and the write."""

    def __init__(self, cloud: FakeCloud, index: int, delays_s: Iterable[int], n_slices: int) -> None:
        self._cloud = cloud
        self._delays_s = cycle(delays_s)
        self._passed = asyncio.Event()
        service: Any = self  # it passes on what it lacks
        who: dict[str, Any] = {"cluster_id": f"cluster-{index}", "uid": f"uid-{index}"}
        self.world = ResourceWorld(service=service, adopt="team-v5e", node={"count": n_slices}, **who)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        due = self.world.now + next(self._delays_s)
        while self.world.now < due:
            await self._passed.wait()
        await self._cloud.set_node_labels(place, node_id, labels, version)

    def tick(self) -> None:
        self.world.now += TICK_S
        self._passed.set()
        self._passed.clear()


async def pass_time(clouds: list[SlowCloud], n_ticks: int) -> None:
    tasks: dict[int, asyncio.Task[float | None]] = {}
    for tick in count():
        if tick >= n_ticks and all(task.done() for task in tasks.values()):
            return
        for index, cloud in enumerate(clouds):
            if tick < n_ticks and (index not in tasks or tasks[index].done()):
                tasks[index] = asyncio.create_task(cloud.world.reconcile())
        for _ in range(N_TURNS):
            await asyncio.sleep(0)
        for cloud in clouds:
            cloud.tick()


def list_owners(clouds: list[SlowCloud]) -> list[SlowCloud]:
    return [
        c for c in clouds if c.world.raw is not None and c.world.condition("Accepted") == ("True", "Accepted")
    ]


async def play(delays_s: list[list[int]], n_slices: int) -> None:
    cloud = FakeCloud(lambda: 0.0)
    made = make_cloud_resource(make_resource(node={"count": n_slices}), "ACTIVE")
    node = {key: value for key, value in made.node.items() if key not in {"labels", "metadata"}}
    cloud.add(replace(made, node=node))
    clouds = [SlowCloud(cloud, index, delays, n_slices) for index, delays in enumerate(delays_s)]
    await pass_time(clouds, N_TICKS)
    (owner,) = list_owners(clouds)
    assert {node.labels[UID_LABEL] for node in cloud.nodes.values()} == {owner.world.uid}
    others = [each for each in clouds if each is not owner]
    for other in others:
        assert other.world.condition("Accepted") == ("False", "NotOurs")
        other.world.delete()
    await pass_time(others, 20)
    assert all(other.world.raw is None for other in others)
    assert cloud.resources[PLACE, made.id].state == "ACTIVE"
    owner.world.delete()
    await pass_time([owner], 40)
    assert cloud.resources[PLACE, made.id].state == "DELETING"


delays = st.lists(st.integers(0, 55), min_size=1, max_size=4)


@settings(max_examples=scaled(25), deadline=None)
@given(st.lists(delays, min_size=2, max_size=3), st.integers(1, 3))
@example([[0], [0]], 2)
@example([[0, 0], [10, 0]], 2)
@example([[0], [55]], 1)
def test_one_object_has_it_whatever_the_delays(delays_s: list[list[int]], n_slices: int) -> None:
    asyncio.run(play(delays_s, n_slices))
