"""Test what all controllers write to their objects: status, finalizers and events."""

import logging
from typing import Any

import pytest

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES
from stepkeeper_operator.errors import ApiError, ConflictError
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.writing import ObjectWriter
from stepkeeper_operator.metrics import Metrics

EVENT = ObjectEvent(warning=True, reason="QuotaExhausted", message="no quota" + "!" * 2000)
ACTIVE = QueuedResourceStatus(state=QueuedResourceState.ACTIVE)
PLACE = ("queuedresources", "default", "slice")


class Desk:
    """A writer of QueuedResources beside a cluster with one."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(lambda: 1000.0)
        self.metrics = Metrics()
        shared = Shared(
            cluster=self.cluster,
            cache=Cache(),
            metrics=self.metrics,
            identity="operator-1",
            acting=lambda: True,
            clock=lambda: 1000.0,
        )
        self.writer = ObjectWriter(resource=QUEUED_RESOURCES, shared=shared)
        self.cluster.put("queuedresources", {"metadata": {"name": "slice", "namespace": "default"}})

    @property
    def raw(self) -> dict[str, Any]:
        return self.cluster.objects[PLACE]

    @property
    def meta(self) -> ObjectMeta:
        return ObjectMeta.model_validate(self.raw["metadata"])

    def count(self, what: str) -> bool:
        line = f'stepkeeper_writes_total{{kind="QueuedResource",what="{what}"}} 1.0'
        return line in self.metrics.render().decode().splitlines()


async def test_an_event_regards_its_object(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    with caplog.at_level(logging.INFO):
        await desk.writer.create_event(desk.meta, EVENT)
    (event,) = desk.cluster.list_objects("events")
    assert event["regarding"] == {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "QueuedResource",
        "name": "slice",
        "namespace": "default",
        "uid": desk.meta.uid,
    }
    assert (event["type"], event["reason"]) == ("Warning", "QuotaExhausted")
    assert event["eventTime"] == "1970-01-01T00:16:40.000000Z"
    assert len(event["note"]) == 1024
    (record,) = caplog.records
    assert vars(record).items() >= {"kind": "QueuedResource", "object": "default/slice"}.items()


async def test_an_event_that_is_lost_is_told_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.cluster.refusals["create", "events"] = ApiError(500, "down")
    await desk.writer.create_event(desk.meta, EVENT)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["cannot write event"]


@pytest.mark.parametrize("text", ["ä" * 600, "x" + "データ" * 200, "🙂" * 300])
async def test_an_event_is_cut_by_bytes_and_through_no_character(text: str) -> None:
    desk = Desk()
    await desk.writer.create_event(desk.meta, ObjectEvent(warning=True, reason="Failed", message=text))
    (event,) = desk.cluster.list_objects("events")
    assert text.startswith(event["note"])
    assert 1020 < len(event["note"].encode()) <= 1024


async def test_what_somebody_changed_meanwhile_is_a_conflict_and_is_left_as_it_is() -> None:
    desk = Desk()
    meta = desk.meta
    desk.cluster.put("queuedresources", desk.raw)
    for write in (
        desk.writer.write_status(meta, ACTIVE),
        desk.writer.set_finalizers(meta, ["stepkeeper.dev/cloud-tpu"]),
    ):
        with pytest.raises(ConflictError):
            await write
    assert "status" not in desk.raw
    assert "finalizers" not in desk.raw["metadata"]
    assert not desk.count("status")
    raw = await desk.writer.write_status(desk.meta, ACTIVE)
    assert raw["status"] == desk.raw["status"] == ACTIVE.to_raw()
    assert desk.count("status")
