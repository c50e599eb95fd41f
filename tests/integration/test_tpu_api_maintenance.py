"""Maintenance in the fake Cloud TPU API: announced, waited for, performed, simulated."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from google.api_core import exceptions

from tpuapi.clients import Clients, create_active, node, node_name, queued_name, state_of
from tpuapi.core.values import EventKind
from tpuapi.fake import FakeTpu

AUTOCHECKPOINT = {"node": node(autocheckpoint_enabled=True)}


async def seen(clients: Clients, node_id: str) -> tuple[str, str, str]:
    """Return a node's state, its health, and the status of its maintenance."""
    found = await clients.alpha.get_node(name=node_name(node_id))
    return found.state.name, found.health.name, found.upcoming_maintenance.maintenance_status.name


async def test_a_window_is_announced(tpu: FakeTpu, clients: Clients) -> None:
    """UpcomingMaintenance: "This timestamp value is in RFC3339 text format"."""
    await create_active(tpu, clients, "qr")
    tpu.announce_maintenance("qr", starts_in_s=600, lasts_s=1800, can_reschedule=True)
    upcoming = (await clients.alpha.get_node(name=node_name("qr"))).upcoming_maintenance
    start = datetime.fromisoformat(upcoming.window_start_time)
    assert start.timestamp() == tpu.clock.now() + 600
    assert datetime.fromisoformat(upcoming.window_end_time) - start == timedelta(minutes=30)
    assert (upcoming.type_.name, upcoming.can_reschedule) == ("SCHEDULED", True)
    assert await seen(clients, "qr") == ("READY", "HEALTHY", "PENDING")
    tpu.cancel_maintenance("qr")
    assert await seen(clients, "qr") == ("READY", "HEALTHY", "UNKNOWN")


async def test_a_node_is_down_for_the_window_and_comes_back(tpu: FakeTpu, clients: Clients) -> None:
    await create_active(tpu, clients, "qr")
    tpu.announce_maintenance("qr", starts_in_s=600, lasts_s=1800)
    tpu.step(600)
    assert await seen(clients, "qr") == ("REPAIRING", "UNHEALTHY_MAINTENANCE", "ONGOING")
    assert await state_of(clients, "qr") == "ACTIVE"
    tpu.step(1800)
    assert await seen(clients, "qr") == ("READY", "HEALTHY", "UNKNOWN")


async def test_a_node_may_not_come_back(tpu: FakeTpu, clients: Clients) -> None:
    """TERMINATED: "TPU node has been terminated due to maintenance"."""
    await create_active(tpu, clients, "qr")
    tpu.announce_maintenance("qr", starts_in_s=600, ends_in="TERMINATED")
    tpu.step(600)
    assert (await seen(clients, "qr"))[0] == "TERMINATED"
    tpu.step(10)
    assert await state_of(clients, "qr") == "SUSPENDING"
    tpu.step(15)
    resource = await clients.alpha.get_queued_resource(name=queued_name("qr"))
    assert (resource.state.state.name, resource.state.state_initiator.name) == ("SUSPENDED", "SERVICE")


class TestAutocheckpoint:
    async def test_maintenance_waits_5_minutes_for_the_processes(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await create_active(tpu, clients, "qr", spec=AUTOCHECKPOINT)
        tpu.announce_maintenance("qr", starts_in_s=600)
        tpu.step(600)
        assert await seen(clients, "qr") == ("READY", "UNHEALTHY_MAINTENANCE", "ONGOING")
        terminating = tpu.events[-1]
        assert terminating.kind is EventKind.TERMINATING
        assert terminating.deadline == terminating.at + 300
        tpu.step(299)
        assert (await seen(clients, "qr"))[0] == "READY"
        tpu.step(1)
        assert (await seen(clients, "qr"))[0] == "REPAIRING"
        assert [(event.kind.value, event.reason) for event in tpu.events] == [
            ("ready", "created"),
            ("terminating", "maintenance"),
            ("gone", "maintenance"),
        ]

    async def test_maintenance_goes_on_once_the_processes_have_exited(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await create_active(tpu, clients, "qr", spec=AUTOCHECKPOINT)
        tpu.announce_maintenance("qr", starts_in_s=600)
        tpu.step(660)
        tpu.processes_exited("qr")
        assert (await seen(clients, "qr"))[0] == "REPAIRING"

    async def test_a_preemption_waits_for_nobody(self, tpu: FakeTpu, clients: Clients) -> None:
        await create_active(tpu, clients, "qr", spec=AUTOCHECKPOINT, spot={})
        tpu.preempt("qr")
        assert (await seen(clients, "qr"))[0] == "PREEMPTED"
        assert tpu.events[-1].reason == "preempted"


class TestAsked:
    async def test_maintenance_can_be_performed_before_its_window(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        """can_reschedule: "Indicates if the maintenance can be customer triggered"."""
        await create_active(tpu, clients, "qr")
        request = {"name": node_name("qr")}
        with pytest.raises(exceptions.FailedPrecondition, match="no pending maintenance"):
            await clients.alpha.perform_maintenance(request=request)
        tpu.announce_maintenance("qr", starts_in_s=6000)
        with pytest.raises(exceptions.FailedPrecondition, match="can't be rescheduled"):
            await clients.alpha.perform_maintenance(request=request)
        tpu.announce_maintenance("qr", starts_in_s=6000, lasts_s=600, can_reschedule=True)
        operation = await clients.alpha.perform_maintenance(request=request)
        tpu.step(0)
        assert await seen(clients, "qr") == ("REPAIRING", "UNHEALTHY_MAINTENANCE", "ONGOING")
        tpu.step(600)
        assert (await operation.result(timeout=60)).state.name == "READY"

    async def test_it_can_be_performed_on_nodes_of_a_queued_resource(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await create_active(tpu, clients, "qr", count=3)
        await create_active(tpu, clients, "other")
        for name in ("qr-0", "qr-1", "other"):
            tpu.announce_maintenance(name, starts_in_s=6000, lasts_s=600, can_reschedule=True)

        async def perform(*names: str) -> Any:
            node_names = [node_name(name) for name in names]
            return await clients.alpha.perform_maintenance_queued_resource(
                request={"name": queued_name("qr"), "node_names": node_names}
            )

        for wrong in ((), ("other",)):
            with pytest.raises(exceptions.InvalidArgument):
                await perform(*wrong)
        with pytest.raises(exceptions.FailedPrecondition):
            await perform("qr-0", "qr-2")
        operation = await perform("qr-0", "qr-1")
        assert [(await seen(clients, f"qr-{n}"))[0] for n in range(3)] == ["REPAIRING", "REPAIRING", "READY"]
        tpu.step(600)
        assert (await operation.result(timeout=60)).name == queued_name("qr")

    async def test_an_event_can_be_simulated(self, tpu: FakeTpu, clients: Clients) -> None:
        """worker_ids: "The 0-based worker ID. If it is empty, worker ID 0 will be selected"."""
        await create_active(tpu, clients, "qr", spec=AUTOCHECKPOINT)
        with pytest.raises(exceptions.InvalidArgument, match="0-based"):
            await clients.alpha.simulate_maintenance_event(
                request={"name": node_name("qr"), "worker_ids": ["1"]}
            )
        operation = await clients.alpha.simulate_maintenance_event(request={"name": node_name("qr")})
        assert await seen(clients, "qr") == ("READY", "UNHEALTHY_MAINTENANCE", "ONGOING")
        tpu.step(300)
        assert (await seen(clients, "qr"))[0] == "REPAIRING"
        with pytest.raises(exceptions.FailedPrecondition, match="REPAIRING"):
            await clients.alpha.simulate_maintenance_event(request={"name": node_name("qr")})
        tpu.step(60)
        assert (await operation.result(timeout=60)).health.name == "HEALTHY"

    async def test_v2_has_no_maintenance(self, clients: Clients) -> None:
        assert not hasattr(clients.v2, "simulate_maintenance_event")


async def test_nodes_show_health_and_symptoms(tpu: FakeTpu, clients: Clients) -> None:
    await create_active(tpu, clients, "qr")
    tpu.set_health("qr", "TIMEOUT", "no heartbeat")
    tpu.add_symptom("qr", "HBM_OUT_OF_MEMORY", "16 GiB", worker_id="0")
    found = await clients.v2.get_node(name=node_name("qr"))
    assert (found.health.name, found.health_description) == ("TIMEOUT", "no heartbeat")
    assert [(each.symptom_type.name, each.details) for each in found.symptoms] == [
        ("HBM_OUT_OF_MEMORY", "16 GiB")
    ]
